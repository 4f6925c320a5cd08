"""The store in tests/data/golden: what it holds is a function of names and numbers alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from checkpoint.schema import SCHEMA_FILE, Layout, Ledger, Schema, SourceFile, Tie, pack
from megatrain.config import RunConfig
from megatrain.train_state import TrainState
from tests.support.tiering_stores import put
from tiering.bandwidth import Rates
from tiering.records import Record
from tiering.store import create_store

FOLDER = Path(__file__).parents[1] / "data" / "golden"
STORE = FOLDER / "format-1"
RETAIN = 2
GENERATIONS = (1, 2, 3)  # of which the first is not kept

SIDE_FILES: Mapping[str, bytes] = {
    "config.json": b'{"model_type": "llama"}\n',
    "chat/template.jinja": "Größe: {{ messages }}\n".encode(),
}
SCHEMA = Schema(
    layout=Layout.FP32,
    model_type="llama",
    units=(
        pack(
            "outer_in",
            [("model.embed.weight", (17, 8), "BF16"), ("model.places.weight", (5, 8), "F32")],
        ),
        pack(
            "layer.000",
            [
                ("model.layers.0.up.weight", (8, 24), "BF16"),
                ("model.layers.0.norm.weight", (8,), "F32"),
                ("model.layers.0.scale", (), "F16"),
            ],
        ),
        pack("layer.001", [("model.layers.1.up.weight", (8, 24), "BF16")]),
        pack("outer_out", [("model.norm.weight", (8,), "BF16")]),
        pack("carried.F32", [("model.inv_freq", (5,), "F32")], trainable=False),
        pack("carried.U8", [("model.mask", (5, 500_000), "U8")], trainable=False),
    ),
    ties=(Tie(alias="lm_head.weight", target="model.embed.weight", in_source=True),),
    files={name: hashlib.sha256(data).hexdigest() for name, data in SIDE_FILES.items()},
    ledger=Ledger(sources=(SourceFile(name="model.safetensors", tensors=8, nbytes=2_501_500),)),
)
CODECS = {
    "layer.000.weights": "blosc-zstd-shuffle",
    "layer.000.master": "blosc-zstd-shuffle",
    "layer.001.weights": "blosc-lz4-bitshuffle",
    "layer.001.master": "zstd",
    "layer.001.exp_avg": "none",
    "layer.001.exp_avg_sq": "zstd",
    "carried.U8.weights": "zstd",
}
TRAINED = tuple(t.name for unit in SCHEMA.units if unit.trainable for t in unit.tensors)


def records() -> tuple[Record, ...]:
    """Return the records, some raw and some encoded; one has three shards of one chunk each."""
    small = {"carried.U8.weights": 1 << 20}
    return tuple(
        replace(
            record,
            codec=CODECS.get(record.name),
            shard_nbytes=small.get(record.name, record.shard_nbytes),
        )
        for record in SCHEMA.records()
    )


def content(record: Record, generation: int) -> np.ndarray:
    """Return the elements of a record; a shared one is the same in every generation."""
    unit, _, role = record.name.rpartition(".")
    if record.name == "carried.U8.weights":  # its second shard is all zeros
        out = np.zeros(record.length, np.uint8)
        out[:1000] = _bits(record.name, 500).view(np.uint8)
        out[-1000:] = out[:1000]
        return out
    if role == "weights" and not record.shared:
        master = content(SCHEMA.record(SCHEMA.unit(unit), "master"), generation)
        return master.astype(ml_dtypes.bfloat16)
    values = np.zeros(record.length, np.float32)
    key = f"{0 if record.shared else generation}/{record.name}"
    for tensor in SCHEMA.unit(unit).tensors:
        drawn = _bits(f"{key}/{tensor.name}", tensor.length) / 65536 - 0.5
        values[tensor.offset : tensor.end] = drawn**2 if role == "exp_avg_sq" else drawn
    return values


def _bits(key: str, count: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_256(key.encode()).digest(2 * count), "<u2")


def train_state(generation: int) -> TrainState:
    config = {
        "model": "/golden/model",
        "out": "/golden/run",
        "data": {"train": "/golden/rows.jsonl"},
    }
    return TrainState(
        run_id="golden",
        config=RunConfig.from_json(json.dumps(config)),
        data="ab" * 32,
        step=10 * generation,
        cursor=80 * generation,
        skipped=1,
        counts=dict.fromkeys(TRAINED, 10 * generation) | {TRAINED[-1]: generation},
    )


def _rates(folder: Path) -> Rates:
    """Take the first drive for so much faster that both get some of everything."""
    rate = 4.7e9 if folder.name == "a" else 1e9
    return Rates(read_bytes_per_s=rate, written_bytes_per_s=rate)


def make(store: Path) -> None:
    """Make the store anew, with both drives in folders inside it."""
    files = {SCHEMA_FILE: SCHEMA.encode(), **SIDE_FILES}
    with tempfile.TemporaryDirectory() as elsewhere:
        drives = [Path(elsewhere) / name for name in ("a", "b")]
        for drive in drives:
            drive.mkdir()
        with create_store(
            store,
            records=records(),
            schema_files=files,
            drives=drives,
            slots=RETAIN + 1,
            measure=_rates,
        ) as writer:
            for generation in GENERATIONS:
                slot = writer.begin(wait_s=0) if writer.working is None else writer.working
                checksums = {
                    record.name: put(
                        writer, slot, record, content(record, generation).view(np.uint8)
                    )
                    for record in writer.records.values()
                    if generation == 1 or not record.shared
                }
                writer.commit(
                    step=10 * generation,
                    train_state=train_state(generation).encode(),
                    checksums=checksums,
                    retain=RETAIN,
                )
            writer.drop_free_slots()
        for number in range(len(drives)):
            link = store / "drives" / str(number)
            shutil.move(os.readlink(link), store / f"shards-{number}")
            link.unlink()
            link.symlink_to(f"../shards-{number}")
    (store / "LOCK").unlink()
