"""Tensors whose size is no multiple of anything, in every tier, cut at the oddest places."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint.convert import BYTES_PER_ELEMENT, convert
from checkpoint.export import export_hf
from checkpoint.schema import SCHEMA_FILE, Layout, Schema, Unit
from checkpoint.verify import verify
from checkpoint.windows import PIECE_MULTIPLE
from megatrain.shape import PIECE
from tests.support.hf_folders import (
    SINGLE,
    Tensors,
    assert_same,
    load,
    load_folder,
    save,
)
from tests.support.runs import (
    as_float,
    differing,
    freeze_imports,
    numbers,
    read_state,
    run_config,
    train,
)
from tests.support.tiering_stores import memory_folder, read_record, small_chunks
from tiering import bandwidth
from tiering.records import Tier
from tiering.store import StoreReader, open_reader

LEAST_RAM = PIECE_MULTIPLE * BYTES_PER_ELEMENT  # a conversion moves 4096 elements at a time
STREAMED = {  # nothing stays in memory, and a slab is as short as one can be
    "memory__resident": 1,
    "memory__gradients": "disk",
    "memory__slab": PIECE,
    "store__verify_reads": "always",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """A model of odd sizes.

    Attributes:
        family: Of transformers.
        sizes: What differs from two layers of 3 heads and hidden states of 30.
        nbytes: The sizes that its tensors have in bf16.
        layout: Of its store.
    """

    family: str = "llama"
    sizes: Mapping[str, Any]
    nbytes: Set[int]
    layout: Layout = Layout.FP32

    @property
    def vocabulary(self) -> int:
        return int(self.sizes.get("vocab_size", 97))

    @property
    def dtype(self) -> str:
        """Of its computation."""
        return "float32" if self.layout is Layout.FLOAT32 else "bfloat16"


RECIPE = Odd(sizes={}, nbytes={60, 600, 1_800, 3_060, 5_820})
MODELS = {
    "sizes without a common factor": RECIPE,
    "the same in float32": replace(RECIPE, layout=Layout.FLOAT32),
    "tensors longer than a slab": Odd(
        sizes={"vocab_size": 2203, "intermediate_size": 1101, "tie_word_embeddings": True},
        nbytes={60, 600, 1_800, 66_060, 132_180},
    ),
    "one element, and one element past a block": Odd(
        family="smollm3",
        sizes={
            "vocab_size": 4097,
            "hidden_size": 1,
            "intermediate_size": 2049,
            "num_attention_heads": 1,
            "head_dim": 1,
            "no_rope_layers": [0, 0],  # a head of one element cannot be rotated
            "rms_norm_eps": 1e-2,  # or a norm over one element leaves its sign alone
            "pad_token_id": 0,
        },
        nbytes={2, 4096 + 2, 2 * 4096 + 2},
        layout=Layout.FLOAT32,
    ),
    "rows longer than a chunk": Odd(
        sizes={"vocab_size": 11, "hidden_size": 4101, "intermediate_size": 3},
        nbytes={8_202, 24_606, 82_020, 90_222, 246_060},
        layout=Layout.FLOAT32,
    ),
    "a table of one row": Odd(sizes={"vocab_size": 1}, nbytes={60, 600, 1_800, 3_060}),
}


@pytest.fixture(name="odd", params=MODELS)
def _odd(request: pytest.FixtureRequest) -> Odd:
    return MODELS[request.param]


@pytest.fixture(name="model")
def _model(odd: Odd, tmp_path: Path) -> Path:
    return make_model(odd, tmp_path / "model")


def make_model(odd: Odd, folder: Path) -> Path:
    """Save a model in bf16, random in every weight, so that each of them has a gradient."""
    from transformers import AutoConfig, AutoModelForCausalLM

    freeze_imports()
    sizes = {
        "vocab_size": 97,
        "hidden_size": 30,
        "intermediate_size": 51,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = AutoConfig.for_model(odd.family, **(sizes | dict(odd.sizes)))
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    plain.to(torch.bfloat16).save_pretrained(folder)
    return folder


def seven_rows(path: Path, vocabulary: int) -> Path:
    """Write fewer samples than two windows of six hold."""
    generator = np.random.default_rng(1)
    rows = [generator.integers(0, vocabulary, 4 + (i * 7) % 40).tolist() for i in range(7)]
    for row in rows:
        row.append(vocabulary - 1)  # the table's last row ends where nothing else does
    path.write_text("".join(json.dumps({"input_ids": r, "labels": r}) + "\n" for r in rows))
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run of three steps left: its metrics, the state of each tensor, and an export."""

    rows: list[dict[str, Any]]
    state: Mapping[str, np.ndarray]
    exported: Tensors


def trained(
    store: Path, data: Path, dtype: str, tier: Tier = Tier.PINNED, **memory: object
) -> Outcome:
    """Train three steps on ``store`` where it lies, see where that was, verify and export."""
    settings = {
        "train__dtype": dtype,
        "train__micro_batch": 3,
        "train__weight_decay": 0.1,
        "train__no_decay": [],
    }
    out = store.with_name(f"{store.name} run")
    seen = train(run_config(store, data, out, **settings, **memory))
    assert seen.plan is not None
    (_, largest) = max((nbytes, found) for found, nbytes in seen.plan.tiers.items())
    assert largest is tier
    checked = verify(store, deep=True)
    assert checked.ok, checked.findings
    return Outcome(rows=numbers(out), state=read_state(store), exported=exported(store))


CARRIED = (torch.bool, torch.uint8, torch.int8, torch.bfloat16, torch.float32, torch.int64)


@pytest.fixture(name="memory")
def _memory() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def test_a_model_of_odd_sizes_trains_to_the_same_bits_in_every_tier(
    odd: Odd, model: Path, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = load(model / SINGLE)
    assert {tensor.nbytes for tensor in source.values()} == odd.nbytes
    data = seven_rows(tmp_path / "rows.jsonl", odd.vocabulary)
    convert(model, memory / "kept", layout=odd.layout)
    wanted = trained(memory / "kept", data, odd.dtype)
    for name, tensor in source.items():
        start = tensor.float().reshape(-1).numpy()
        assert (as_float(wanted.state, f"{name}/master") != start).any(), f"{name} never moved"
    monkeypatch.setattr(bandwidth.measure, "__defaults__", (1 << 20,))  # enough to share by
    raw, encoded = tmp_path / "raw", memory / "encoded"
    with small_chunks():
        convert(model, raw, layout=odd.layout, drives=two_drives(tmp_path), ram=LEAST_RAM)
        convert(model, encoded, layout=odd.layout, codec="zstd", ram=LEAST_RAM)
        for store, tier in ((raw, Tier.NVME), (encoded, Tier.ZARR)):
            assert_same(exported(store), source)
            found = trained(store, data, odd.dtype, tier, **STREAMED)
            assert found.rows == wanted.rows
            assert differing(wanted.state, found.state) == []
            assert_same(found.exported, wanted.exported)
            assert dirty_gaps(store) == []


def two_drives(folder: Path) -> list[Path]:
    drives = [folder / name for name in "ab"]
    for drive in drives:
        drive.mkdir()
    return drives


def exported(store: Path) -> Tensors:
    out = store.with_name(f"{store.name} out")
    export_hf(store, out, overwrite=True)
    return load_folder(out)


def dirty_gaps(store: Path) -> list[str]:
    """Return the records with a byte that belongs to no tensor and is not zero."""
    with open_reader(store) as reader:
        schema = Schema.decode(reader.schema_file(SCHEMA_FILE))
        return [
            record.name
            for unit in schema.units
            for record in (schema.record(unit, role) for role in schema.roles(unit))
            if between(stored(reader, record.name), ranges(unit, record.itemsize)).any()
        ]


def ranges(unit: Unit, itemsize: int) -> list[tuple[int, int]]:
    return [(tensor.offset * itemsize, tensor.end * itemsize) for tensor in unit.tensors]


def between(data: np.ndarray, taken: list[tuple[int, int]]) -> np.ndarray:
    """Return what lies between and behind the given ranges."""
    free = np.ones(len(data), np.bool_)
    for start, stop in taken:
        free[start:stop] = False
    return data[free]


def stored(reader: StoreReader, name: str) -> np.ndarray:
    """Return a record, and what lies behind it in its last chunk, where that is not encoded."""
    record = reader.records[name]
    if record.codec is not None:
        return read_record(reader, name)
    geometry = record.geometry
    data = b"".join(
        shard.path.read_bytes()[: geometry.chunks_in(number) * geometry.chunk_nbytes]
        for number, shard in enumerate(reader.shards(name))
    )
    assert len(data) == geometry.chunk_count * geometry.chunk_nbytes
    return np.frombuffer(data, np.uint8)


def test_what_is_carried_along_may_have_any_length(tmp_path: Path) -> None:
    model = make_model(MODELS["sizes without a common factor"], tmp_path / "model")
    tensors = load(model / SINGLE)
    generator = torch.Generator().manual_seed(1)
    for number, (dtype, length) in enumerate(itertools.product(CARRIED, (0, 1, 4097, 12_289))):
        name = f"model.layers.{number}.self_attn.masked_bias"
        bits = torch.randint(0, 256, (length * dtype.itemsize,), generator=generator)
        tensors[name] = (bits % (2 if dtype is torch.bool else 256)).to(torch.uint8).view(dtype)
    save(model, tensors)
    with small_chunks():
        for codec in (None, "blosc-zstd-shuffle"):
            store = tmp_path / f"store {codec}"
            convert(model, store, codec=codec, ram=LEAST_RAM)
            assert verify(store, deep=True).ok
            assert_same(exported(store), tensors)
            assert dirty_gaps(store) == []
