from __future__ import annotations

import pytest

from checkpoint.matching import Match, check_shapes, match_names
from checkpoint.names import Expected, Parameter
from tiering.errors import RefusedError

NAMES = ("base.embed", "base.layers.0.w", "base.layers.0.attn.c_attn.bias", "base.norm", "head")
EXPECTED = Expected(
    model_type="toy",
    parameters=tuple(Parameter(name=name, shape=(2,), unit="u") for name in NAMES[:-1]),
    aliases={"head": "base.embed"},
    buffers={"base.correction": (3,)},
    transient=frozenset({"base.rotary_emb.inv_freq"}),
    ignored=(r"layers\.9.*", r"attn.bias"),
    base_prefix="base",
)
SOURCE = (*NAMES, "base.correction")


def match(*names: str) -> Match:
    return match_names(EXPECTED, names, "model folder")


def test_names_of_the_model_match_themselves() -> None:
    found = match(*SOURCE)
    assert found.parameters == {name: name for name in NAMES[:-1]}
    assert found.aliases == {"head": "head"}
    assert found.carried == {"base.correction": "base.correction"}
    assert (found.stripped, found.added) == ("", "")


def test_a_tied_name_may_be_absent() -> None:
    assert match(*SOURCE[:-2], SOURCE[-1]).aliases == {}


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module._orig_mod.", "module.module.", "net."])
def test_a_prefix_of_all_names_is_stripped_and_said(prefix: str) -> None:
    found = match(*(prefix + name for name in SOURCE))
    assert found.stripped == prefix
    assert found.parameters["base.norm"] == f"{prefix}base.norm"
    assert any(repr(prefix) in note for note in found.notes)


def test_a_prefix_of_some_names_is_refused_and_counted() -> None:
    names = [("_orig_mod." if "layers" in name else "") + name for name in SOURCE]
    with pytest.raises(RefusedError) as caught:
        match(*names)
    assert str(caught.value) == (
        "model folder: matched 3 of the 5 tensors that toy expects; "
        "missing 2: base.layers.0.w, base.layers.0.attn.c_attn.bias; "
        "unexpected 2: _orig_mod.base.layers.0.w, _orig_mod.base.layers.0.attn.c_attn.bias; "
        "2 of 6 names begin with '_orig_mod.'"
    )


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_a_missing_base_prefix_is_added_but_not_to_the_head(wrapper: str) -> None:
    found = match(
        *(wrapper + name.removeprefix("base.") for name in SOURCE), f"{wrapper}h.attn.bias"
    )
    assert found.added == "base."
    assert found.aliases == {"head": f"{wrapper}head"}
    assert found.parameters["base.embed"] == f"{wrapper}embed"
    assert found.carried["base.h.attn.bias"] == f"{wrapper}h.attn.bias"


def test_a_base_prefix_on_some_names_only_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"missing 1: base\.norm; unexpected 1: norm$"):
        match(*(name.replace("base.norm", "norm") for name in SOURCE))


@pytest.mark.parametrize(
    "name",
    [
        "base.rotary_emb.inv_freq",
        "base.layers.0.self_attn.rotary_emb.inv_freq",
        "base.layers.0.attn.bias",
        "base.layers.0.attn.masked_bias",
        "base.layers.9.enorm.weight",
    ],
)
def test_buffers_that_no_model_loads_are_carried(name: str) -> None:
    found = match(*SOURCE, name)
    assert found.carried[name] == name
    assert name not in found.parameters


@pytest.mark.parametrize(
    "name",
    [
        "base.layers.1.attn.c_attn.bias",
        "base.layers.0.w_scale_inv",
        "base.layers.0.mlp.bias",
        "xlayers.9.w",
    ],
)
def test_what_nobody_knows_is_refused(name: str) -> None:
    with pytest.raises(RefusedError, match=f"unexpected 1: {name}$"):
        match(*SOURCE, name)


def test_a_missing_persistent_buffer_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"matched 4 of the 5 .* missing 1: base\.correction$"):
        match(*SOURCE[:-1])


def test_three_names_of_each_side_are_listed() -> None:
    with pytest.raises(RefusedError) as caught:
        match("a", "b", "c", "d")
    assert "missing 5: base.embed, base.layers.0.w, base.layers.0.attn.c_attn.bias and 2 more" in (
        str(caught.value)
    )
    assert "unexpected 4: a, b, c and 1 more" in str(caught.value)


def test_a_shape_that_differs_is_named_with_file_found_and_expected() -> None:
    wanted = {"a": (2, 3), "b": (1,), "c": (4,)}
    found = {"a": ("f", [2, 3]), "b": ("g", [2]), "c": ("g", [])}
    with pytest.raises(RefusedError) as caught:
        check_shapes(wanted, found)
    assert str(caught.value) == (
        "g: tensor b has shape [2], expected [1] by config.json; 1 more shapes differ"
    )
