from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiering.errors import CorruptionError, RefusedError
from tiering.manifest import (
    Generation,
    Manifest,
    Root,
    decode_table,
    digest,
    encode_table,
    entries,
)
from tiering.records import Record

SOURCE = Path("/store/file.json")
RECORDS = (
    Record(name="a", dtype="float32", length=(3 << 20) + 1),
    Record(name="b", dtype="bfloat16", length=10, shared=True),
)
TABLE = np.array([1, 2, 3, 4, 0xFFFFFFFF], np.uint32)
MANIFEST = Manifest(
    uuid="0" * 32,
    generation=3,
    parent=2,
    slot=1,
    step=40,
    records=entries(RECORDS),
    metadata=dict.fromkeys(("zarr.json", "a/zarr.json", "b/zarr.json"), "ab" * 32),
    table_digest=digest(encode_table([TABLE])),
    train_state={"lr": 0.1, "cursor": [1, None], "text": "\u00fc"},
)
ROOT = Root(
    uuid="0" * 32,
    drives={0: 0.75, 2: 0.25, 5: 0.0},
    schema="cd" * 32,
    generations=(
        Generation(number=2, parent=None, slot=0, step=30, digest="ef" * 32),
        Generation(number=3, parent=2, slot=1, step=40, digest="ab" * 32),
    ),
)


def test_a_manifest_comes_back_as_it_was() -> None:
    assert Manifest.decode(MANIFEST.encode(), SOURCE) == MANIFEST


def test_a_root_comes_back_as_it_was() -> None:
    assert Root.decode(ROOT.encode(), SOURCE) == ROOT
    assert ROOT.latest.number == 3
    assert ROOT.find(2) == ROOT.generations[0]
    assert ROOT.find(1) is None


def test_a_table_is_little_endian_in_the_order_of_the_records() -> None:
    data = encode_table([TABLE[:4], TABLE[4:]])
    assert data == bytes.fromhex("01000000 02000000 03000000 04000000 ffffffff")
    assert decode_table(data, MANIFEST, SOURCE).tolist() == TABLE.tolist()
    with pytest.raises(CorruptionError, match="generation 3 was committed with"):
        decode_table(data[:-1] + b"\x00", MANIFEST, SOURCE)
    assert [(e.first, e.count) for e in MANIFEST.records.values()] == [(0, 4), (4, 1)]


def _edited(data: bytes, edit: Callable[[Any], object]) -> bytes:
    document = json.loads(data)
    edit(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("slot"), "slot: missing"),
        (lambda d: d.update(slot=-1), "slot: found -1, expected an integer of at least 0"),
        (lambda d: d.update(slot=True), "slot: found True"),
        (lambda d: d.update(step="1"), "step: found '1'"),
        (lambda d: d.update(more=1), "more: unknown key"),
        (lambda d: d.update(uuid="../x"), "uuid: found '../x'"),
        (lambda d: d.update(records=[]), r"records: found \[\], expected an object"),
        (lambda d: d["records"]["a"].update(dtype="float33"), r"records.a.dtype: found 'float33'"),
        (lambda d: d["records"]["a"].update(first=1), "records.a.first: found 1, expected 0"),
        (lambda d: d["records"]["b"].update(first=3), "records.b.first: found 3, expected 4"),
        (lambda d: d["records"]["a"].update(count=3), "records.a.count: found 3, expected 4"),
        (lambda d: d["records"]["a"].update(files=[1]), "records.a.files"),
        (lambda d: d["records"].update({"../up": d["records"].pop("b")}), "metadata|records"),
        (
            lambda d: d["metadata"].update({"../../x": "0"}),
            "metadata.../../x: found '0', expected text that matches",
        ),
        (lambda d: d["metadata"].pop("a/zarr.json"), "metadata: found 'a/zarr.json'"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused_by_field(
    edit: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(CorruptionError, match=message) as caught:
        Manifest.decode(_edited(MANIFEST.encode(), edit), SOURCE)
    assert str(SOURCE) in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p.update(slot=0), "slot: found 0, expected 1 as in the last of generations"),
        (lambda p: p.update(sha256="0" * 64), "sha256: found"),
        (lambda p: p["generations"].reverse(), "generations: .*ascending"),
        (lambda p: p.update(generations=[]), "generations: .*at least one"),
        (lambda p: p["generations"][0].pop("step"), r"generations\[0\].step: missing"),
        (lambda p: p.update(drives=2), "drives: found 2, expected a list"),
        (lambda p: p.update(drives=[]), r"drives: found \[\], expected ascending .* at least one"),
        (lambda p: p["drives"].reverse(), r"drives: found \[5, 2, 0\], expected ascending"),
        (lambda p: p["drives"].append(p["drives"][2]), r"drives: found \[0, 2, 5, 5\]"),
        (lambda p: p["drives"][0].update(drive=-1), r"drives\[0\].drive: found -1"),
        (lambda p: p["drives"][0].update(drive="0"), r"drives\[0\].drive: found '0'"),
        (lambda p: p["drives"][1].update(share=1.5), r"drives\[1\].share: found 1.5, .* 0 to 1"),
        (lambda p: p["drives"][1].update(share=True), r"drives\[1\].share: found True"),
        (lambda p: p["drives"][1].update(share=float("nan")), "no valid JSON .NaN is no number"),
        (lambda p: p["drives"][1].pop("share"), r"drives\[1\].share: missing"),
        (lambda p: p["drives"][1].update(path="/x"), r"drives\[1\].path: unknown key"),
        (lambda p: [d.update(share=0) for d in p["drives"]], "a share above 0 in at least one"),
        (lambda p: p.update(schema="../../etc"), "schema: found"),
    ],
)
def test_a_root_that_breaks_a_rule_is_refused_by_field(
    edit: Callable[[Any], object], message: str
) -> None:
    data = _edited(ROOT.encode(), lambda d: edit(d["attributes"]["megatrain"]))
    with pytest.raises(CorruptionError, match=message):
        Root.decode(data, SOURCE)


@pytest.mark.parametrize("data", [b"", b"\x00", b"[]", b'"x"', b'{"a": 1, "a": 2}', b"[" * 5000])
def test_what_is_no_document_is_refused(data: bytes) -> None:
    for decode in (Manifest.decode, Root.decode):
        with pytest.raises(CorruptionError, match=r"/store/file\.json"):
            decode(data, SOURCE)


def test_a_newer_format_is_refused_before_anything_else_is_looked_at() -> None:
    newer = _edited(MANIFEST.encode(), lambda d: (d.clear(), d.update(format=2, what="ever")))
    with pytest.raises(RefusedError, match="written in format 2, this program reads up to"):
        Manifest.decode(newer, SOURCE)


def test_a_group_of_somebody_else_is_no_store() -> None:
    other = b'{"zarr_format": 3, "node_type": "group", "attributes": {"x": 1}}'
    with pytest.raises(RefusedError, match="a Zarr group, but no store"):
        Root.decode(other, SOURCE)


def test_a_train_state_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(MANIFEST, train_state={"loss": float("nan")}).encode()
