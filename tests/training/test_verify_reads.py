"""``store.verify_reads: always``: bytes that change under a run are noticed when they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.runs import (
    Quiet,
    differing,
    read_state,
    run_config,
    tiny_llama,
    token_rows,
    train,
)
from tiering.errors import CorruptionError
from tiering.records import round_up
from tiering.store import open_reader

DISK = {"memory__resident": 1, "memory__gradients": "disk", "train__steps": 5}


@pytest.fixture(scope="module", name="inputs")
def _inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_llama(folder / "model", tie=True), token_rows(folder / "rows.jsonl")


def flip_everywhere(store: Path, record: str) -> None:
    """Change a byte of a record in every slot, past the page cache."""
    for path in (store / "shards").glob(f"*.{record}.0"):
        if path.stat().st_size < 100:  # encoded, and never written
            continue
        fd = os.open(path, os.O_RDWR)
        byte = os.pread(fd, 1, 70)[0]
        os.pwrite(fd, bytes([byte ^ 0x10]), 70)
        os.fsync(fd)
        os.close(fd)


@pytest.mark.parametrize(
    ("cadence", "record"),
    [(1, "layer.000.weights"), (9, "outer_in.weights"), (9, "layer.001.exp_avg")],
)
def test_a_byte_that_changes_after_it_was_written_is_found_at_its_next_read(
    inputs, tmp_path, cadence, record
):
    store = tmp_path / "run" / "store"

    def damage(row) -> None:
        if row["step"] == 2:
            flip_everywhere(store, record)

    config = run_config(
        *inputs,
        tmp_path / "run",
        train__dtype="bfloat16",
        store__verify_reads="always",
        store__commit_every=cadence,
        **DISK,
    )
    # at cadence 1 the row of step 2 is reported just before its commit names the damaged slot
    with pytest.raises(CorruptionError, match=record.replace(".", r"\.")) as caught:
        train(config, Quiet(damage))
    assert (caught.value.record, caught.value.drive) == (record, 0)
    with open_reader(store) as reader:
        assert reader.manifest.step == (2 if cadence == 1 else 0)


@pytest.mark.parametrize("reads", ["first", "always"])
def test_an_encoded_chunk_is_checked_at_every_read_whatever_is_asked_for(
    inputs, tmp_path, reads
) -> None:
    def damage(row) -> None:
        if row["step"] == 2:
            flip_everywhere(tmp_path / "run" / "store", "layer.001.exp_avg")

    config = run_config(
        *inputs,
        tmp_path / "run",
        store__tier="zarr",
        store__verify_reads=reads,
        store__commit_every=9,
        **DISK,
    )
    with pytest.raises(CorruptionError, match=r"layer\.001\.exp_avg") as caught:
        train(config, Quiet(damage))
    assert (caught.value.record, caught.value.drive) == ("layer.001.exp_avg", 0)
    with open_reader(tmp_path / "run" / "store") as reader:
        assert reader.manifest.step == 0


@pytest.mark.parametrize(("tier", "cadence"), [("nvme", 3), ("zarr", 1)])
def test_checking_every_read_changes_no_number(inputs, tmp_path, cadence, tier):
    states = []
    for reads in ("first", "always"):
        config = run_config(
            *inputs,
            tmp_path / reads,
            store__verify_reads=reads,
            store__tier=tier,
            store__commit_every=cadence,
            **DISK,
        )
        train(config)
        states.append(read_state(tmp_path / reads / "store"))
    assert differing(*states) == []


def test_a_piece_out_of_order_brings_its_chunk_in(tmp_path) -> None:
    from tests.support.tiering_stores import content, make_store, small_chunks, small_record
    from tiering.read_checks import EveryRead
    from tiering.store import open_writer

    record = small_record("a", "float32", 3 * 4096 + 5)
    with small_chunks(), open_writer(make_store(tmp_path / "s", records=[record])) as writer:
        reads, expected = EveryRead(record, writer), content(record, 1)
        table, chunk = writer.checksums("a"), record.geometry.chunk_nbytes
        for offset, count in ((4096, 4096), (0, chunk), (chunk - 8192, 16384), (3 * chunk, 20)):
            out = bytearray(round_up(count, 4096) if offset % 4096 == 0 else count)
            reads.stream(0, offset, memoryview(out), table)
            valid = expected[offset : offset + len(out)].tobytes()
            assert bytes(out) == valid.ljust(len(out), b"\0")
        with (tmp_path / "s/shards/0.a.0").open("r+b") as file:
            file.seek(chunk + 100)
            file.write(b"\xff\x00\xff")
        for call in (reads.stream, reads.gather):
            with pytest.raises(CorruptionError, match="chunk 1"):
                call(0, 2 * chunk - 4096, memoryview(bytearray(4096)), table)
