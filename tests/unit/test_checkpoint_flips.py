"""Whatever is wrong with one file of a retained generation is found, and its place is named.

A sample; scripts/flip_bits.py does all of it to every file.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from checkpoint.verify import verify
from megatrain import run
from megatrain.trainer import Stop
from tests.support.bad_bytes import (
    KINDS,
    Damage,
    Trained,
    bits,
    flip,
    judge,
    make_trained,
    other_damage,
    wrong_names,
)
from tests.support.byte_map import Region, StoreFile, byte_map, unused_files
from tests.support.runs import Quiet
from tests.support.tiering_stores import memory_folder, small_chunks
from tiering.store import open_reader


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    """A store with raw and encoded shards on three drives, and tied embeddings."""
    with small_chunks(), memory_folder() as folder:
        folder.chmod(0o755)  # for whoever may not read the files
        yield make_trained(folder, KINDS["fp32; raw, blosc-zstd-shuffle"])


@pytest.fixture
def store(trained: Trained) -> Iterator[Path]:
    """The store, which every test leaves as it was."""
    yield trained.store
    assert verify(trained.store, deep=True).ok


def files_of(store: Path) -> list[StoreFile]:
    return list(byte_map(store).values())


def assert_found_and_named(store: Path, damage: Damage) -> str:
    verdict = judge(store, damage)
    assert verdict.stage, damage
    assert not verdict.wrong, damage
    return verdict.stage


def test_a_flipped_bit_in_each_kind_of_file_is_found_and_named(store: Path) -> None:
    rng = random.Random(1)
    files = files_of(store)
    rng.shuffle(files)
    for file in {file.kind: file for file in files if not file.regions}.values():
        assert_found_and_named(store, flip(file, rng.randrange(bits(file))))
    parts: dict[tuple[str, str], tuple[StoreFile, Region]] = {
        (file.kind, region.what): (file, region) for file in files for region in file.regions
    }
    stages = {}
    for what, (file, region) in parts.items():
        byte = rng.randrange(region.start, region.stop)
        stages[what] = assert_found_and_named(store, flip(file, 8 * byte + rng.randrange(8)))
    assert stages == {
        ("shard", "chunk"): "first read",
        ("shard", "padding"): "verify --deep",
        ("shard", "index"): "verify --deep",
        ("encoded shard", "chunk"): "first read",
        ("encoded shard", "index"): "first read",
    }


def test_flipped_bits_in_all_shards_at_once_are_all_named(store: Path) -> None:
    rng = random.Random(2)
    shards = [file for file in files_of(store) if file.regions]
    for _ in range(5):
        flips = [flip(file, rng.randrange(bits(file))) for file in shards]
        with ExitStack() as stack:
            for damage in flips:
                stack.enter_context(damage.applied())
            named = wrong_names(store, flips)
        assert not named


def test_every_byte_of_the_small_files_is_looked_at(store: Path) -> None:
    """Root, labels and the group above the slots: nothing else vouches for them."""
    rng = random.Random(4)
    kinds = ("root", "label of a drive", "group")
    for file in (file for file in files_of(store) if file.kind in kinds and not file.generations):
        for bit in rng.sample(range(bits(file)), 25):
            with flip(file, bit).applied():
                result = verify(store)
            assert str(file.path) in {finding.file for finding in result.findings}, bit


WHATS = (
    "deleted",
    "a byte too short",
    "a byte too long",
    "all zeros",
    "a hole",
    "may not be read",
    "as a generation earlier",
    "exchanged",
)


@pytest.mark.parametrize("what", WHATS)
def test_other_damage_is_found_and_named(store: Path, what: str) -> None:
    damages = [damage for damage in other_damage(store) if damage.what == what]
    for damage in random.Random(what).sample(damages, 2):
        assert_found_and_named(store, damage)


def test_a_root_that_is_gone_is_damage_and_not_the_lack_of_a_store(store: Path) -> None:
    [root] = [file for file in files_of(store) if file.kind == "root"]
    [gone] = [d for d in other_damage(store) if d.what == "deleted" and d.files == (root,)]
    assert assert_found_and_named(store, gone) == "open"


def test_a_link_to_the_wrong_drive_is_named_and_not_the_shard(store: Path) -> None:
    link = next(file for file in files_of(store) if file.kind == "link to a shard")
    digit = str(link.path.readlink()).index("drives/") + len("drives/")
    damage = flip(link, 8 * digit)  # 0 and 1 differ in the last bit, and so do 2 and 3
    assert_found_and_named(store, damage)


def test_an_older_root_is_taken_for_damage_as_it_lists_what_was_dropped(trained: Trained) -> None:
    path = trained.store / "zarr.json"
    newest = path.read_bytes()
    path.write_bytes(trained.old_root)
    result = verify(trained.store)
    path.write_bytes(newest)
    assert not result.ok
    assert verify(trained.store).ok


def test_what_no_generation_consists_of_means_nothing_and_is_made_anew(trained: Trained) -> None:
    rng = random.Random(7)
    unused = unused_files(trained.store)
    assert {"LOCK", "zarr.json"} < {path.name for path in unused}
    for path in unused:
        flip_in_place(path, rng.randrange(size(path)))
    assert verify(trained.store, deep=True).ok
    go_on(trained, steps=4)
    assert verify(trained.store, deep=True).ok


def test_what_a_commit_does_not_write_is_looked_at_before_a_slot_is_used(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    """The index of a raw shard, and the zeros before it, are as old as its slot."""
    unused = unused_files(trained.store)
    path = next(path for path in unused if path.name.endswith(".layer.000.master.0"))
    flip_in_place(path, size(path) - 10)
    assert verify(trained.store, deep=True).ok
    go_on(trained, steps=5)
    assert f"{path} at offset {size(path) - 10}" in caplog.text
    assert verify(trained.store, deep=True).ok


def go_on(trained: Trained, *, steps: int) -> None:
    changed = [f"train.steps={steps}"]
    run.resume(Path(trained.run.out), changed, Quiet(), Stop(), allow_changes=True)
    with open_reader(trained.store) as reader:
        assert reader.manifest.step == steps


def size(path: Path) -> int:
    return path.stat().st_size


def flip_in_place(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
