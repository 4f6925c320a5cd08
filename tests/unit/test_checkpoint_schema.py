from __future__ import annotations

import json

import pytest

from checkpoint.schema import (
    Ignored,
    Layout,
    Ledger,
    Role,
    Schema,
    SourceFile,
    Tie,
    Unit,
    carried_name,
    layer_name,
    pack,
)
from tiering.errors import CorruptionError, RefusedError


def make_schema(layout: Layout = Layout.FP32) -> Schema:
    return Schema(
        layout=layout,
        model_type="llama",
        units=(
            pack("outer_in", [("embed", (7, 3), "BF16"), ("positions", (5,), "F32")]),
            pack(layer_name(0), [("a", (65,), "BF16"), ("b", (), "F16")]),
            pack(layer_name(1), [("c", (64,), "BF16")]),
            pack("outer_out", []),
            pack(carried_name("U8"), [("mask", (2, 2), "U8")], trainable=False),
        ),
        ties=(Tie(alias="head", target="embed", in_source=True),),
        files={"config.json": "0" * 64},
        ledger=Ledger(
            sources=(SourceFile(name="model.safetensors", tensors=6, nbytes=300),),
            ignored=(Ignored(name="old.bin", reason="not read"),),
            notes=("a note",),
            stripped="module.",
        ),
    )


def test_tensors_start_at_multiples_of_64_elements_and_never_overlap() -> None:
    layer = make_schema().unit("layer.000")
    assert [tensor.offset for tensor in layer.tensors] == [0, 128]
    assert layer.length == 192
    assert layer.parameters == 66


def test_a_unit_without_tensors_still_has_a_record() -> None:
    assert make_schema().unit("outer_out").length == 64


def test_overlapping_tensors_are_not_a_unit() -> None:
    first, second = make_schema().unit("layer.000").tensors
    with pytest.raises(ValueError, match=r"unit u: a overlaps"):
        Unit(name="u", tensors=(second, first))


@pytest.mark.parametrize(
    ("layout", "roles", "nbytes"),
    [
        (Layout.FP32, ("weights", "master", "exp_avg", "exp_avg_sq"), 14),
        (Layout.FLOAT32, ("master", "exp_avg", "exp_avg_sq"), 12),
    ],
)
def test_a_layout_costs_its_bytes_per_parameter(
    layout: Layout, roles: tuple[str, ...], nbytes: int
) -> None:
    schema = make_schema(layout)
    unit = schema.unit("layer.001")
    assert schema.roles(unit) == roles
    assert sum(schema.record(unit, role).nbytes for role in roles) == nbytes * 64


def test_untrained_tensors_are_shared_and_keep_their_dtype() -> None:
    schema = make_schema()
    (record,) = [record for record in schema.records() if record.shared]
    assert (record.name, record.dtype, record.length) == ("carried.U8.weights", "uint8", 64)
    assert schema.parameters == 21 + 5 + 65 + 1 + 64


def test_a_records_attributes_list_the_tensors_inside() -> None:
    schema = make_schema()
    record = schema.record(schema.unit("layer.000"), Role.MASTER)
    assert record.attributes == {
        "unit": "layer.000",
        "role": "master",
        "tensors": [
            {"name": "a", "shape": [65], "dtype": "BF16", "offset": 0},
            {"name": "b", "shape": [], "dtype": "F16", "offset": 128},
        ],
    }
    assert json.loads(json.dumps(record.attributes)) == record.attributes


def test_a_tied_name_is_found_at_its_target() -> None:
    unit, tensor = make_schema().find("head")
    assert (unit.name, tensor.name) == ("outer_in", "embed")
    with pytest.raises(KeyError):
        make_schema().find("nothing")


def test_layers_are_in_the_order_in_which_they_run() -> None:
    assert [unit.name for unit in make_schema().layers] == ["layer.000", "layer.001"]


def test_a_schema_survives_encoding() -> None:
    schema = make_schema()
    assert Schema.decode(schema.encode()) == schema
    assert Schema.decode(schema.encode()).encode() == schema.encode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["layout"], "fp8", "layout: found 'fp8', expected one of fp32, float32"),
        (["format"], 2, "written in format 2, this program reads up to format 1"),
        (["units", 0, "tensors", 0, "offset"], 3, "at offset 3"),
        (
            ["units", 0, "tensors", 0, "offset"],
            -64,
            r"\[0\].offset: found -64, expected an integer",
        ),
        (
            ["units", 0, "tensors", 0, "shape"],
            [True],
            r"units\[0\].tensors\[0\].shape: found \[True\]",
        ),
        (["units", 0, "tensors", 0, "dtype"], "X", "dtype: found 'X', expected one of BOOL, U8, "),
        (["units", 1, "trainable"], 1, r"units\[1\].trainable: found 1, expected true or false"),
        (["ties", 0, "target"], "gone", "tie to gone, which is in no unit"),
        (["ties", 0, "alias"], "a", "tensor a is there twice"),
        (["ledger", "surprise"], 1, "ledger.surprise: unknown key"),
        (["files"], None, "files: found None, expected an object"),
    ],
)
def test_a_damaged_schema_is_named(path: list[str | int], value: object, message: str) -> None:
    document = json.loads(make_schema().encode())
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(RefusedError, match=f"schema.json: .*{message}|schema.json: {message}"):
        Schema.decode(json.dumps(document).encode())


def test_a_missing_field_is_named() -> None:
    document = json.loads(make_schema().encode())
    del document["units"][0]["name"]
    with pytest.raises(CorruptionError, match=r"units\[0\].name: missing"):
        Schema.decode(json.dumps(document).encode())


def test_bytes_that_are_not_json_are_refused() -> None:
    with pytest.raises(CorruptionError, match=r"schema\.json: no valid JSON"):
        Schema.decode(b"\xff{")
