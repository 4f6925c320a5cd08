"""What other readers see in a store that was trained equals what is exported from it."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import torch
import zarr
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from checkpoint.export import export_hf
from tests.support.runs import run_config, tiny_llama, token_rows, train
from tiering.backends import zarr_bfloat16


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("trained")
    model, data = tiny_llama(folder / "model", tie=True), token_rows(folder / "rows.jsonl")
    config = run_config(model, data, folder / "run", train__dtype="bfloat16", memory__resident=1)
    train(config)
    store = folder / "run" / "store"
    export_hf(store, folder / "fp32", dtype="float32")
    export_hf(store, folder / "source")
    return store, folder


def arrays(store):
    """Yield each array's path inside the store, and its attributes, for the newest generation."""
    slot = json.loads((store / "zarr.json").read_text())["attributes"]["megatrain"]["slot"]
    for path in sorted((store / "slots" / str(slot)).iterdir()):
        if path.is_dir():
            yield path, json.loads((path / "zarr.json").read_text())["attributes"]


def tensors(flat, attributes):
    for tensor in attributes["tensors"]:
        length = int(np.prod(tensor["shape"]))
        yield tensor["name"], flat[tensor["offset"] : tensor["offset"] + length]


def read_zarr(path):
    zarr_bfloat16.register_bfloat16()
    return np.asarray(zarr.open_array(path, mode="r")[:])


def read_tensorstore(path):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(tensorstore.open(spec).result().read().result())


@pytest.mark.parametrize("read", [read_zarr, read_tensorstore])
def test_masters_and_weights_equal_the_exported_tensors(trained, read):
    store, folder = trained
    masters = load_file(folder / "fp32" / "model.safetensors")
    weights = {
        name: tensor.view(dtype=torch.int16).numpy()
        for name, tensor in load_torch(folder / "source" / "model.safetensors").items()
    }
    seen = set()
    for path, attributes in arrays(store):
        flat = read(path)
        for name, values in tensors(flat, attributes):
            if attributes["role"] == "master":
                assert np.array_equal(values, masters[name].reshape(-1)), name
                seen.add(name)
            if attributes["role"] == "weights":
                assert values.dtype == ml_dtypes.bfloat16
                assert np.array_equal(values.view(np.int16), weights[name].reshape(-1)), name
            if attributes["role"] == "exp_avg_sq":
                assert (values > 0).any(), name
    assert seen == masters.keys()
