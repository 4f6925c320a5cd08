"""The newest generation damaged as kills and power cuts do it: the one before it is taken."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from checkpoint.verify import verify
from megatrain import run
from megatrain.ckpt_cli import cli
from megatrain.trainer import Stop
from tests.support.runs import (
    Quiet,
    differing,
    numbers,
    read_state,
    run_config,
    tiny_llama,
    token_rows,
    train,
)
from tiering.generations import read_root
from tiering.slots import existing_slots

STEPS = {
    "train__steps": 5,
    "store__commit_every": 2,
    "store__retain": 2,
    "store__spare_slots": 1,
}


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after a save at 2 and at 4, and the same run to its end."""
    folder = tmp_path_factory.mktemp("saves")
    inputs = tiny_llama(folder / "model", num_hidden_layers=1), token_rows(folder / "rows.jsonl")
    train(run_config(*inputs, folder / "whole", **STEPS))
    stop = Stop()
    stopped = run_config(*inputs, folder / "stopped", **STEPS)
    run.train(stopped, Quiet(lambda row: row["step"] == 4 and stop.request()), stop)
    generations = read_root(folder / "stopped/store").generations
    assert [(g.number, g.step) for g in generations] == [(2, 2), (3, 4)]
    assert len(existing_slots(folder / "stopped/store")) == 4
    return folder


def files_of_the_newest(store: Path) -> list[Path]:
    """Everything that belongs to the newest generation alone."""
    newest = read_root(store).latest
    folders = [store / newest.folder, store / "slots" / str(newest.slot)]
    inside = [Path(r) / f for folder in folders for r, _, names in os.walk(folder) for f in names]
    shards = sorted((store / "shards").glob(f"{newest.slot}.*"))
    return [path for path in (*inside, *shards) if not path.is_symlink()]


def flip_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 255]))


def size(path: Path) -> int:
    return path.stat().st_size


def empty_dir(files: list[Path]) -> None:
    for path in files:
        path.unlink()


KINDS: dict[str, Callable[[list[Path]], object]] = {
    "cut_largest": lambda files: os.truncate(largest(files), size(largest(files)) // 2),
    "zero_all": lambda files: [os.truncate(path, 0) for path in files],
    "drop_smallest": lambda files: min(files, key=size).unlink(),
    "drop_last_written": lambda files: max(files, key=lambda p: p.stat().st_mtime_ns).unlink(),
    "empty_dir": empty_dir,
    "flip_byte": lambda files: flip_byte(largest(files)),
}


def largest(files: list[Path]) -> Path:
    return max(files, key=size)


def resume(place: Path, *options: object) -> Result:
    return CliRunner().invoke(cli, ["resume", str(place), *map(str, options)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_newest_save_is_skipped_by_name_and_the_run_ends_the_same(
    folder: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "run"
    shutil.copytree(folder / "stopped", place, symlinks=True)
    before = {path: path.read_bytes() for path in files_of_the_newest(place / "store")}
    KINDS[kind](list(before))
    hurt = [path for path, data in before.items() if not path.exists() or path.read_bytes() != data]

    found = verify(place / "store", deep=True)
    assert [(item.generation, item.ok) for item in found.generations] == [(2, True), (3, False)]
    assert {finding.file for finding in found.findings} & set(map(str, hurt))

    named = resume(place, "--generation", 3)
    assert named.exit_code == 3, named.output
    assert "Traceback" not in named.output
    assert any(str(path) in named.stderr for path in hurt)
    assert [g.number for g in read_root(place / "store").generations] == [2, 3]

    caplog.clear()
    result = resume(place)
    assert result.exit_code == 0, result.output
    said = [r.getMessage() for r in caplog.records if "generation 3" in r.getMessage()]
    assert any("is skipped" in line and str(path) in line for line in said for path in hurt)
    assert differing(read_state(folder / "whole/store"), read_state(place / "store")) == []
    assert numbers(place) == numbers(folder / "whole")
    assert verify(place / "store", deep=True).ok


def test_a_run_goes_back_to_the_generation_that_is_named(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(folder / "stopped", place, symlinks=True)
    refused = resume(place, "--generation", 7)
    assert refused.exit_code == 3
    assert "no generation 7; there is 2 (step 2), 3 (step 4)" in refused.stderr
    shards = {p: p.stat().st_mtime_ns for p in (place / "store/shards").iterdir()}
    stop = Stop()
    stop.request()  # nothing but the roll-back
    run.resume(place, ("store.reserve=false",), Quiet(), stop, generation=2)
    generations = read_root(place / "store").generations
    assert [(g.number, g.parent, g.step) for g in generations] == [(3, 2, 4), (4, 2, 2)]
    assert [row["step"] for row in numbers(place)] == [1, 2]
    assert {p: p.stat().st_mtime_ns for p in shards} == shards, "bytes were moved"
    assert run.resume(place, (), Quiet(), Stop()).finished
    assert differing(read_state(folder / "whole/store"), read_state(place / "store")) == []
    assert numbers(place) == numbers(folder / "whole")


def test_newest_is_the_highest_number_of_this_store_whatever_names_and_times_say(
    folder: Path, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    shutil.copytree(folder / "stopped", place, symlinks=True)
    foreign = place / "store/manifests/99"
    shutil.copytree(folder / "whole/store/manifests/4", foreign)
    os.utime(place / "store/manifests/2/manifest.json")
    expected = np.concatenate(list(read_state(folder / "stopped/store").values()))
    found = np.concatenate(list(read_state(place / "store").values()))
    np.testing.assert_array_equal(found, expected)
    assert run.resume(place, (), Quiet(), Stop()).finished
    assert differing(read_state(folder / "whole/store"), read_state(place / "store")) == []
