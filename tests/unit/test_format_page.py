"""The tables of docs/format.md have the fields that are written, no more and no fewer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from checkpoint.schema import TRAINABLE_ROLES, Layout, Role
from tests.support.format_page import PAGE
from tests.support.golden import STORE
from tiering import manifest, records, small_files
from tiering.checksum import crc32c
from tiering.codecs import Codec, inner_codecs
from tiering.labels import Owner, expected_label
from tiering.records import ITEMSIZE, Record
from tiering.zarr_documents import array_document, shard_index

TEXT = PAGE.read_text()


def fields_of(table: str) -> list[str]:
    """Return what the first cells of the table ``field of <table>`` name, in order."""
    match = re.search(rf"\| field of {table} \|.*\n\|---.*\n((?:\|.*\n)+)", TEXT)
    assert match, f"no table of {table}"
    return [
        name for row in match[1].splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]


def first(values: Any) -> Any:
    return next(iter(values.values() if isinstance(values, dict) else values))


ROOT = json.loads((STORE / "zarr.json").read_text())["attributes"]["megatrain"]
MANIFEST = json.loads((STORE / "manifests/3/manifest.json").read_text())
SCHEMA = json.loads(first((STORE / "schema").glob("*/schema.json")).read_text())
ARRAY = json.loads((STORE / "slots/2/layer.000.weights/zarr.json").read_text())
WRITTEN = {
    "the root": ROOT,
    "a drive": first(ROOT["drives"]),
    "a generation": first(ROOT["generations"]),
    "a manifest": MANIFEST,
    "a record": first(MANIFEST["records"]),
    "an array": json.loads(array_document(Record(name="a", dtype="float32", length=1))),
    "a label": json.loads(expected_label("0" * 32, 0, Owner(store=Path("/"), folder=""))),
    "a tensor": first(ARRAY["attributes"]["tensors"]),
    "the schema": SCHEMA,
    "a unit": first(SCHEMA["units"]),
    "a tie": first(SCHEMA["ties"]),
    "the ledger": SCHEMA["ledger"],
}


@pytest.mark.parametrize("table", WRITTEN)
def test_a_table_has_the_fields_that_are_written(table):
    assert sorted(fields_of(table)) == sorted(WRITTEN[table])


def test_the_codecs_on_the_page_are_those_that_are_written():
    rows = dict(re.findall(r"^\| (null|`[\w-]+`) \| (`bytes`.*) \|$", TEXT, re.MULTILINE))
    assert set(rows) == {"null", *(f"`{codec}`" for codec in Codec)}
    for codec in Codec:
        names = [part["name"] for part in inner_codecs(4, codec)]
        found = re.findall(r"`(bytes|zstd|blosc|crc32c)`(?! ?,? clevel)", rows[f"`{codec}`"])
        assert [name for name in names if name in found] == names
        for part in inner_codecs(4, codec):
            for key in ("level", "cname", "clevel", "shuffle", "blocksize"):
                value = part.get("configuration", {}).get(key)
                assert value is None or str(value) in rows[f"`{codec}`"]


def test_every_data_type_and_layout_is_on_the_page():
    for name in ITEMSIZE:
        assert f"`{name}`" in TEXT or re.fullmatch(r"u?int(16|32)", name)
    for layout in Layout:
        row = re.search(rf"^\| `{layout}` \| (.*) \|", TEXT, re.MULTILINE)
        assert row
        assert set(re.findall(r"`(\w+)`", row[1])) == {str(r) for r in TRAINABLE_ROLES[layout]}
    assert all(f"`{role}`" in TEXT for role in Role)


def test_the_limits_on_the_page_are_those_that_are_kept():
    assert records.NBYTES_MOST == 2**60
    assert "at most 2^60 bytes" in TEXT
    assert records.SHARD_NBYTES_MOST == 2**40
    assert "from 1 to 2^40" in TEXT
    assert manifest.CHUNKS_MOST == 2**26
    assert "at most 2^26 chunks" in TEXT
    assert small_files.DOCUMENT_MOST == 16 << 20
    assert "longer than 16 MiB" in TEXT
    assert small_files.SCHEMA_MOST == 256 << 20
    assert "longer than 256 MiB" in TEXT
    assert f"`{records.NAME.pattern}`" in TEXT


def test_the_index_of_a_plain_shard_is_as_the_page_says():
    record = Record(name="a", dtype="float32", length=3_000_000, shard_nbytes=8 << 20)
    geometry = record.geometry
    assert (geometry.chunk_length, geometry.chunk_count, geometry.chunks_per_shard) == (2**20, 3, 2)
    places = b"".join(n.to_bytes(8, "little") for n in (0, 4 << 20, 2**64 - 1, 2**64 - 1))
    assert shard_index(record, 1) == places + crc32c(places).to_bytes(4, "little")
