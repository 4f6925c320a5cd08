"""Any flipped bit in any file of any retained generation is found, and its place is named."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from checkpoint.convert import convert
from checkpoint.verify import Finding, Findings, verify
from tests.support.hf_folders import make_llama
from tests.support.tiering_stores import memory_folder, put, small_chunks
from tiering.store import open_reader, open_writer


@pytest.fixture(scope="module", params=[None, "blosc-zstd-shuffle"], ids=["plain", "encoded"])
def store(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A store with two generations in two slots on two drives; no slot is free."""
    with small_chunks(), memory_folder() as folder:
        for name in ("a", "b"):
            (folder / name).mkdir()
        make_llama(folder / "model", num_hidden_layers=1, vocab_size=301)
        drives = [folder / "a", folder / "b"]
        convert(folder / "model", folder / "store", drives=drives, codec=request.param)
        _commit_another(folder / "store")
        assert _found(folder / "store").ok
        yield folder / "store"


def _commit_another(store: Path) -> None:
    rng = np.random.default_rng(3)
    with open_writer(store) as writer:
        writer.ensure_slots(2)
        slot = writer.begin()
        tables = {
            record.name: put(writer, slot, record, rng.integers(0, 256, record.nbytes, np.uint8))
            for record in writer.records.values()
        }
        writer.commit(step=1, train_state={}, checksums=tables, retain=2)


def _found(store: Path) -> Findings:
    return verify(store, deep=True)


def _files(store: Path) -> list[Path]:
    drives = [path.resolve() for path in (store / "drives").iterdir()]
    inside = [path for path in store.rglob("*") if path.name != "LOCK"]
    return sorted(
        path
        for path in (*inside, *(path for drive in drives for path in drive.iterdir()))
        if path.is_symlink() or path.is_file()
    )


@contextmanager
def _flipped(path: Path, bit: int) -> Iterator[None]:
    """Flip one bit of a file, or of what a link says, for a while."""
    if path.is_symlink():
        before = os.readlink(path)
        data = bytearray(before.encode())
        data[bit // 8] ^= 1 << bit % 8
        if not all(data):  # a link cannot hold a zero byte
            data[bit // 8] = 1
        path.unlink()
        os.symlink(bytes(data), os.fsencode(path))
        yield
        path.unlink()
        path.symlink_to(before)
        return
    kept = path.read_bytes()
    data = bytearray(kept)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    yield
    path.write_bytes(kept)


def _bits(path: Path) -> int:
    return 8 * (len(os.readlink(path)) if path.is_symlink() else path.stat().st_size)


def _assert_named(path: Path, bit: int, findings: Sequence[Finding], store: Path) -> None:
    named = [f for f in findings if f.file == str(path)]
    assert named, f"{path}, bit {bit}: {findings}"
    finding, drive = named[0], _drive_of(path, store)
    if drive is None or path.name == "drive.json":
        return
    slot, rest = path.name.split(".", 1)
    record = rest.rpartition(".")[0]
    assert f"{finding.unit}.{finding.role}" == record
    assert (finding.drive, finding.generation) == (drive, int(slot) + 1)
    assert finding.offset is not None
    with open_reader(store, generation=finding.generation) as reader:
        chunks = [c for c in reader.chunks(record) if c.path == path and c.offset is not None]
    inside = [c for c in chunks if c.offset <= bit // 8 < c.offset + c.nbytes]
    if inside:
        assert finding.offset == inside[0].offset
        assert finding.tensors
    elif chunks:
        assert finding.offset == bit // 8
    else:
        assert finding.offset <= bit // 8


def _drive_of(path: Path, store: Path) -> int | None:
    for link in (store / "drives").iterdir():
        if path.parent == link.resolve() and path != link:
            return int(link.name)
    return None


def test_a_flipped_bit_in_each_file_is_found_and_named(store: Path) -> None:
    rng = random.Random(1)
    files = _files(store)
    kinds = {path.name if _drive_of(path, store) is None else "shard" for path in files}
    assert {"zarr.json", "manifest.json", "checksums.bin", "schema.json", "shard"} <= kinds
    for path in files:
        bit = rng.randrange(_bits(path))
        with _flipped(path, bit):
            findings = _found(store).findings
        _assert_named(path, bit, findings, store)
    assert _found(store).ok


def test_many_random_flips_at_once_are_all_found_and_named(store: Path) -> None:
    rng = random.Random(2)
    shards = [path for path in _files(store) if _drive_of(path, store) is not None]
    shards = [path for path in shards if path.name != "drive.json"]
    for _ in range(500 // len(shards)):
        bits = {path: rng.randrange(_bits(path)) for path in shards}
        originals = {path: path.read_bytes() for path in shards}
        for path, bit in bits.items():
            data = bytearray(originals[path])
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
        findings = _found(store).findings
        for path, data in originals.items():
            path.write_bytes(data)
        for path, bit in bits.items():
            _assert_named(path, bit, findings, store)
    assert _found(store).ok


def test_every_bit_of_the_small_files_is_looked_at(store: Path) -> None:
    """Root, labels and the group above the slots: nothing else vouches for them."""
    rng = random.Random(4)
    labels = [link.resolve() / "drive.json" for link in (store / "drives").iterdir()]
    for path in (store / "zarr.json", store / "slots" / "zarr.json", *labels):
        for bit in rng.sample(range(_bits(path)), 60):
            with _flipped(path, bit):
                result = verify(store)
            assert str(path) in {finding.file for finding in result.findings}, bit


@pytest.mark.parametrize("pattern", ["0.*.master.0", "0.outer_in.*.0"])
def test_exchanged_files_of_equal_length_are_found(store: Path, pattern: str) -> None:
    drives = [link.resolve() for link in (store / "drives").iterdir()]
    first = next(path for drive in drives for path in sorted(drive.glob(pattern)))
    second = first.with_name(f"1.{first.name[2:]}")
    if first.stat().st_size != second.stat().st_size:
        pytest.skip("encoded: their lengths differ, which is found without reading")
    other = first.with_name("other")
    for source, target in ((first, other), (second, first), (other, second)):
        shutil.move(source, target)
    named = {finding.file for finding in _found(store).findings}
    for source, target in ((first, other), (second, first), (other, second)):
        shutil.move(source, target)
    assert {str(first), str(second)} <= named
    assert _found(store).ok
