from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiering_stores import (
    RECORDS,
    content,
    make_store,
    memory_folder,
    small_chunks,
)
from tiering.checksum import ChunkCrc, crc32c, zeros_crc, zeros_table
from tiering.placement import place
from tiering.records import ALIGNMENT, ITEMSIZE, Record, Tier
from tiering.store import StoreReader, open_reader

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture(name="reader", scope="module")
def _reader() -> Iterator[StoreReader]:
    with small_chunks(), memory_folder() as folder:
        make_store(folder / "store", seed=3)
        with open_reader(folder / "store") as reader:
            yield reader


@SETTINGS
@given(data=st.data())
def test_a_reader_reads_any_range_into_any_buffer(reader: StoreReader, data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(RECORDS))
    start = data.draw(st.integers(0, record.nbytes))
    stop = data.draw(st.integers(start, record.nbytes))
    shift = data.draw(st.sampled_from([0, 1, 16, 4095]))
    room = np.full(stop - start + shift, 0xAA, np.uint8)
    reader.read(record.name, start, memoryview(room)[shift:])
    np.testing.assert_array_equal(room[shift:], content(record, 3)[start:stop])
    assert (room[:shift] == 0xAA).all()


@SETTINGS
@given(data=st.data())
def test_checksums_do_not_depend_on_how_the_bytes_were_cut(data: st.DataObject) -> None:
    with small_chunks():
        record = data.draw(st.sampled_from(RECORDS))
        view = memoryview(content(record, 1))
        cuts = data.draw(st.lists(st.integers(0, record.nbytes), max_size=6))
        edges = [0, *sorted(cuts), record.nbytes]
        pieces = list(itertools.pairwise(edges))
        crc = ChunkCrc(record)
        completed = [c for a, b in pieces for c in crc.feed(a, view[a:b])]
        size = record.geometry.chunk_nbytes
        expected = [crc32c(view[a : a + size]) for a in range(0, record.nbytes, size)]
    assert crc.table().tolist() == expected
    assert completed == list(range(len(expected)))


@given(nbytes=st.integers(0, 200_000))
@SETTINGS
def test_the_checksum_of_zeros_needs_no_zeros(nbytes: int) -> None:
    assert zeros_crc(nbytes) == crc32c(bytes(nbytes))


@SETTINGS
@given(dtype=st.sampled_from(sorted(ITEMSIZE)), length=st.integers(1, 1 << 31))
def test_the_geometry_holds_every_byte_once_at_aligned_places(dtype: str, length: int) -> None:
    record = Record(name="r", dtype=dtype, length=length)
    geometry = record.geometry
    assert geometry.chunk_nbytes % ALIGNMENT == 0
    assert geometry.chunk_length * record.itemsize == geometry.chunk_nbytes
    assert geometry.chunk_nbytes * (geometry.chunk_count - 1) < record.nbytes
    assert record.padded_nbytes <= geometry.chunk_nbytes * geometry.chunk_count
    counts = [geometry.chunks_in(shard) for shard in range(geometry.shard_count)]
    assert sum(counts) == geometry.chunk_count
    assert set(counts[:-1]) <= {geometry.chunks_per_shard}


@SETTINGS
@given(data=st.data())
def test_segments_cover_a_range_once_and_stay_inside_shards(data: st.DataObject) -> None:
    with small_chunks():
        record = data.draw(st.sampled_from(RECORDS))
        offset = data.draw(st.integers(0, record.nbytes))
        nbytes = data.draw(st.integers(0, record.nbytes - offset))
        geometry = record.geometry
        at = offset
        for segment in geometry.segments(offset, nbytes):
            assert segment.nbytes > 0
            assert segment.shard * geometry.shard_nbytes + segment.offset == at
            assert segment.start == at - offset
            assert segment.offset + segment.nbytes <= geometry.shard_nbytes
            at += segment.nbytes
        assert at == offset + nbytes


@SETTINGS
@given(
    lengths=st.lists(st.integers(1, 100_000), max_size=12),
    tolerant=st.sets(st.integers(0, 11)),
    budgets=st.dictionaries(st.sampled_from([Tier.PINNED, Tier.CXL]), st.integers(0, 300_000)),
)
def test_placement_keeps_the_order_and_every_budget(
    lengths: list[int], tolerant: set[int], budgets: dict[Tier, int]
) -> None:
    records = [
        Record(name=f"r{i}", dtype="uint8", length=n, codec="zstd" if i % 2 else None)
        for i, n in enumerate(lengths)
    ]
    places = place(records, budgets, tolerant={f"r{i}" for i in tolerant})
    left = {tier: budgets.get(tier, 0) for tier in (Tier.PINNED, Tier.CXL)}
    for number, record in enumerate(records):
        tier = places[record.name]
        if tier not in left:
            assert tier == record.tier
            assert record.padded_nbytes > left[Tier.PINNED]
            assert number not in tolerant or record.padded_nbytes > left[Tier.CXL]
            continue
        assert tier == Tier.PINNED or number in tolerant
        left[tier] -= record.padded_nbytes
        assert left[tier] >= 0


def test_zeros_have_a_table(tmp_path: Path) -> None:
    with small_chunks():
        for record in RECORDS:
            crc = ChunkCrc(record)
            crc.feed(0, bytes(record.nbytes))
            assert zeros_table(record).tolist() == crc.table().tolist()
