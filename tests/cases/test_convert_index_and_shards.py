"""Folders whose index, shards and file names do not agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.hf_cli import refuse, round_trip
from tests.support.hf_folders import (
    HEAD,
    INDEX,
    NORM,
    SINGLE,
    Tensors,
    load,
    make_llama,
    save,
    shard,
    shard_name,
    without,
    write_json,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.fixture
def tensors(folder: Path) -> Tensors:
    return make_llama(folder)


def junk(tensors: Tensors) -> Tensors:
    return {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_sharded_model_comes_back_bit_for_bit(folder: Path, tensors: Tensors, count: int) -> None:
    shard(folder, tensors, count)
    assert round_trip(folder, tensors) == ""


def test_a_tensor_that_its_shard_lost_is_named_with_index_and_shard(
    folder: Path, tensors: Tensors
) -> None:
    file = shard(folder, tensors, 3)["weight_map"][NORM]
    save(folder, without(load(folder / file), [NORM]), file)
    message = refuse(folder)
    assert all(part in message for part in (INDEX, file, NORM))


def test_a_missing_shard_is_named_with_the_number_of_its_tensors(
    folder: Path, tensors: Tensors
) -> None:
    shard(folder, tensors, 3)
    (folder / shard_name(1, 3)).unlink()
    message = refuse(folder)
    assert INDEX in message
    assert f"shard {shard_name(1, 3)} is not there; it held 7 tensors" in message


@pytest.mark.parametrize("said", ["wrong shard", "nothing"])
def test_a_tensor_in_another_shard_is_taken_from_there_with_a_note(
    folder: Path, tensors: Tensors, said: str
) -> None:
    index = shard(folder, tensors, 3)
    files = sorted(set(index["weight_map"].values()))
    file = index["weight_map"].pop(NORM)
    other = next(name for name in files if name != file)
    if said == "wrong shard":
        index["weight_map"][NORM] = other
    write_json(folder / INDEX, index)
    notes = round_trip(folder, tensors)
    assert notes.count("\n") == 1
    assert all(part in notes for part in (NORM, file, "taken from there"))
    assert (other in notes) == (said == "wrong shard")


def test_a_single_file_beside_a_whole_set_of_shards_must_be_chosen(
    folder: Path, tensors: Tensors
) -> None:
    shard(folder, tensors, 2)
    save(folder, junk(tensors))
    message = refuse(folder)
    assert all(part in message for part in (SINGLE, INDEX, "--weights"))
    notes = round_trip(folder, tensors, "--weights", INDEX)
    assert f"ignored {SINGLE}" in notes


def test_the_file_that_was_named_is_the_one_that_is_read(folder: Path, tensors: Tensors) -> None:
    shard(folder, tensors, 2)
    save(folder, junk(tensors))
    notes = round_trip(folder, junk(tensors), "--weights", SINGLE)
    assert notes.count("ignored") == 2


def test_an_index_decides_over_left_over_shards(folder: Path, tensors: Tensors) -> None:
    shard(folder, tensors, 2)
    for i in range(4):
        save(folder, dict(list(junk(tensors).items())[i::4]), shard_name(i, 4))
    notes = round_trip(folder, tensors)
    assert [notes.count(shard_name(i, 4)) for i in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter.safetensors"])
def test_a_file_outside_the_index_is_ignored_by_name(
    folder: Path, tensors: Tensors, name: str
) -> None:
    shard(folder, tensors, 2)
    save(folder, {"layers.0.attention.wq.weight": torch.full((32, 32), 7.0)}, name)
    assert f"ignored {name}: " in round_trip(folder, tensors)


def test_an_old_pickle_beside_safetensors_is_ignored_by_name(
    folder: Path, tensors: Tensors
) -> None:
    torch.save(junk(tensors), folder / "pytorch_model.bin")
    assert "ignored pytorch_model.bin: not safetensors" in round_trip(folder, tensors)


def test_two_sets_without_an_index_are_listed(folder: Path, tensors: Tensors) -> None:
    shard(folder, tensors, 2)
    for i in range(4):
        save(folder, dict(list(junk(tensors).items())[i::4]), shard_name(i, 4))
    (folder / INDEX).unlink()
    message = refuse(folder)
    assert "model-*-of-00002.safetensors (2 files)" in message
    assert "model-*-of-00004.safetensors (4 files)" in message


def test_one_whole_set_without_an_index_is_used(folder: Path, tensors: Tensors) -> None:
    shard(folder, tensors, 3)
    (folder / INDEX).unlink()
    assert f"no {INDEX}" in round_trip(folder, tensors)


@pytest.mark.parametrize("name", ["model.safetensors.index.fp16.json", "my.safetensors.index.json"])
def test_shards_of_another_name_are_read_by_the_index_that_was_named(
    folder: Path, tensors: Tensors, name: str
) -> None:
    index = shard(folder, tensors, 2)
    for i in range(2):
        (folder / shard_name(i, 2)).rename(folder / shard_name(i, 2).replace("model", "variant"))
    places = {key: file.replace("model", "variant") for key, file in index["weight_map"].items()}
    write_json(folder / name, index | {"weight_map": places})
    (folder / INDEX).unlink()
    assert f"found {name}; name it with --weights" in refuse(folder)
    assert "ignored" not in round_trip(folder, tensors, "--weights", name)
    assert not (folder.parent / "out" / name).exists()


def test_an_index_of_a_variant_is_ignored_by_name(folder: Path, tensors: Tensors) -> None:
    write_json(folder / "model.safetensors.index.fp16.json", {"weight_map": {}})
    notes = round_trip(folder, tensors)
    assert "ignored model.safetensors.index.fp16.json: weights that are not part of" in notes
    assert not (folder.parent / "out" / "model.safetensors.index.fp16.json").exists()


def test_a_broken_set_without_an_index_is_refused(folder: Path, tensors: Tensors) -> None:
    shard(folder, tensors, 3)
    (folder / INDEX).unlink()
    (folder / shard_name(1, 3)).unlink()
    assert f"1 of 3 shards are missing, first {shard_name(1, 3)}" in refuse(folder)


def test_one_tensor_twice_with_equal_bytes_is_accepted(folder: Path, tensors: Tensors) -> None:
    file = shard(folder, tensors, 2)["weight_map"][HEAD]
    other = next(name for name in (shard_name(0, 2), shard_name(1, 2)) if name != file)
    save(folder, load(folder / other) | {HEAD: tensors[HEAD]}, other)
    notes = round_trip(folder, tensors)
    assert all(part in notes for part in (HEAD, file, other))


@pytest.mark.parametrize("change", ["value", "last value", "dtype", "shape"])
def test_one_tensor_twice_with_different_content_is_refused(
    folder: Path, tensors: Tensors, change: str
) -> None:
    file = shard(folder, tensors, 2)["weight_map"][HEAD]
    other = next(name for name in (shard_name(0, 2), shard_name(1, 2)) if name != file)
    copy = tensors[HEAD].clone()
    if change == "last value":
        copy[-1, -1] += 1
    wrong = {
        "value": copy + 1,
        "last value": copy,
        "dtype": copy.float(),
        "shape": copy.reshape(32, 96),
    }[change]
    save(folder, load(folder / other) | {HEAD: wrong}, other)
    message = refuse(folder)
    assert all(part in message for part in (HEAD, file, other, "differ"))


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b"]
)
def test_an_index_cannot_name_a_file_outside_the_folder(
    folder: Path, tensors: Tensors, name: str
) -> None:
    index = shard(folder, tensors, 2)
    index["weight_map"][NORM] = name
    save(folder.parent, tensors, "outside.safetensors")
    write_json(folder / INDEX, index)
    message = refuse(folder)
    assert NORM in message
    assert "is not the plain name of a file" in message


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "expected a JSON object, found list"),
        ({}, "weight_map must be an object that is not empty"),
        ({"weight_map": {}}, "weight_map must be an object that is not empty"),
        ({"weight_map": {"a": 3}}, "weight_map: a: expected a file, found 3"),
        ({"weight_map": None}, "weight_map must be an object"),
    ],
)
def test_an_index_that_is_none_is_refused(
    folder: Path, tensors: Tensors, index: object, message: str
) -> None:
    shard(folder, tensors, 2)
    write_json(folder / INDEX, index)
    said = refuse(folder)
    assert INDEX in said
    assert message in said


def test_an_index_that_is_not_json_is_refused_with_the_place(
    folder: Path, tensors: Tensors
) -> None:
    shard(folder, tensors, 2)
    (folder / INDEX).write_text('{"weight_map": {')
    assert "not JSON" in refuse(folder)
    assert "line 1 column" in refuse(folder)


def test_a_folder_of_links_is_read_through_them(
    folder: Path, tensors: Tensors, tmp_path: Path
) -> None:
    blobs = tmp_path / "blobs"
    folder.rename(blobs)
    folder.mkdir()
    for i, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / str(i))
        (folder / path.name).symlink_to(blobs / str(i))
    round_trip(folder, tensors)
