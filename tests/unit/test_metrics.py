from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.metrics import MetricsLog
from tiering.errors import StorageError


@pytest.fixture
def metrics(tmp_path: Path) -> MetricsLog:
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    for step in range(1, 6):
        log.append({"step": step, "loss": step / 4})
    return log


def steps(log: MetricsLog) -> list[int]:
    return [row["step"] for row in log.read()]


def test_rows_come_back_as_they_were_written(metrics: MetricsLog):
    assert metrics.read()[4] == {"step": 5, "loss": 1.25}


def test_a_row_is_in_the_file_as_soon_as_it_is_appended(metrics: MetricsLog):
    assert metrics.path.read_text().splitlines()[-1] == '{"step": 5, "loss": 1.25}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_null_and_the_file_stays_json(metrics: MetricsLog, value: float):
    metrics.append({"step": 6, "loss": value})
    row = json.loads(metrics.path.read_text().splitlines()[-1], parse_constant=pytest.fail)
    assert row == {"step": 6, "loss": None}


def test_rows_past_the_step_are_dropped_and_new_ones_follow(metrics: MetricsLog):
    assert metrics.truncate_after(3) == 3
    metrics.append({"step": 4, "loss": 0.0})
    assert steps(metrics) == [1, 2, 3, 4]


@pytest.mark.parametrize("torn", [b'{"step": 6, "lo', b'{"step": 6}', b"\0\0\0\0", b"null\n"])
def test_a_torn_last_line_is_left_out_and_gone_after_truncation(metrics: MetricsLog, torn: bytes):
    with metrics.path.open("ab") as file:
        file.write(torn)
    assert steps(metrics) == [1, 2, 3, 4, 5]
    assert metrics.truncate_after(9) == 5
    metrics.append({"step": 6})
    assert steps(metrics) == [1, 2, 3, 4, 5, 6]


def test_truncation_leaves_no_second_file(metrics: MetricsLog):
    metrics.truncate_after(1)
    assert [path.name for path in metrics.path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_truncation_that_was_killed_is_in_nobodys_way(metrics: MetricsLog):
    metrics.path.with_name("metrics.jsonl.new").write_text("killed while it was writ")
    assert metrics.truncate_after(3) == 3
    assert steps(metrics) == [1, 2, 3]


def test_a_run_without_rows_has_nothing_to_drop(tmp_path: Path):
    log = MetricsLog(tmp_path / "none.jsonl")
    assert log.truncate_after(3) == 0
    assert log.read() == []


def test_a_file_that_cannot_be_written_is_a_storage_error(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"cannot open .*metrics\.jsonl: Is a directory"):
        MetricsLog(tmp_path / "metrics.jsonl").append({"step": 1})
