"""No store, whoever made it, gets more than a refusal: no hang, no traceback, no lost file.

In every case each digest fits what was changed below it, so that the change itself is what is met.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from checkpoint.cli import cli
from tests.support import hostile
from tests.support.golden import STORE
from tiering.errors import MegatrainError, RefusedError
from tiering.process import PeakMeter
from tiering.store import open_reader, open_writer

PATIENCE_S = 60
MIB = 1 << 20
ROOM = 48 * MIB  # what a refusal may take: the largest document is read before it is refused

Change = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def give_up(number: int, frame: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    shutil.copytree(STORE, tmp_path / "store", symlinks=True)
    return tmp_path / "store"


def refusal(store: Path, command: str = "inspect", *more: str) -> str:
    """Return what a command says, which refuses the store without a trace."""
    result = CliRunner().invoke(cli, [command, str(store), *more])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 3, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert len(result.stderr) < 3000
    return result.stderr


# -- files ---------------------------------------------------------------------------------------


def text_of(encode: Callable[[str], bytes]) -> Change:
    """Change the bytes of the root but not what they spell."""

    def change(store: Path) -> None:
        path = store / "zarr.json"
        path.write_bytes(encode(path.read_text()))

    return change


def root_is(data: bytes) -> Change:
    return lambda store: (store / "zarr.json").write_bytes(data)


def drive(store: Path, number: int = 0) -> Path:
    return store / f"shards-{number}"


SHARD = "2.layer.000.weights.0"
LINK = "slots/2/layer.000.weights/c/0"
BIG = 100 * MIB

FILES: dict[str, tuple[Change, tuple[str, ...]]] = {
    # the root
    "root with a byte-order mark": (
        text_of(lambda text: b"\xef\xbb\xbf" + text.encode()),
        ("zarr.json: no valid JSON", "BOM"),
    ),
    "root in UTF-16": (text_of(lambda t: t.encode("utf-16")), ("zarr.json: no valid JSON",)),
    "root not in UTF-8": (
        text_of(lambda t: t.replace("zarr_format", "zarr_förmat").encode("latin-1")),
        ("zarr.json: no valid JSON", "utf-8"),
    ),
    "root with NaN": (
        lambda s: (s / "zarr.json").write_text(
            (s / "zarr.json").read_text().replace("0.8246", "NaN")
        ),
        ("zarr.json: no valid JSON", "NaN"),
    ),
    "root with a key twice": (
        root_is(b'{"node_type": "group", "node_type": "group"}'),
        ("zarr.json", "twice"),
    ),
    "root of brackets": (root_is(b"[" * 1_000_000), ("zarr.json: no valid JSON",)),
    "root of digits": (root_is(b"1" * 1_000_000), ("zarr.json: no valid JSON",)),
    "root of 100 MB": (lambda s: hostile.hole(s / "zarr.json", BIG), ("zarr.json: has 104857600",)),
    "root is a FIFO": (lambda s: hostile.fifo(s / "zarr.json"), ("zarr.json: is a FIFO",)),
    "root is a device": (
        lambda s: hostile.link(s / "zarr.json", "/dev/zero"),
        ("zarr.json: is a device, expected a file",),
    ),
    "root is a file of the system": (
        lambda s: hostile.link(s / "zarr.json", "/etc/passwd"),
        ("zarr.json: no valid JSON",),
    ),
    "root is a link to itself": (
        lambda s: hostile.link(s / "zarr.json", "zarr.json"),
        ("zarr.json: Too many levels of symbolic links, expected a file",),
    ),
    "root of a newer format": (
        lambda s: hostile.edit_root(s, lambda p: p.update(format=2)),
        ("zarr.json: written in format 2, this program reads up to format 1",),
    ),
    "root of a newer format, damaged": (
        text_of(lambda t: t.replace('"format": 1', '"format": 2').encode()),
        ("zarr.json: written in format 2", "or it is damaged"),
    ),
    # manifests and checksums
    "two generations of one number": (
        lambda s: hostile.edit_root(s, lambda p: p["generations"][0].update(generation=3)),
        ("generations: found [3, 3], expected ascending numbers",),
    ),
    "a slot that is not there": (
        lambda s: (
            hostile.edit_manifest(s, lambda m: m.update(slot=7)),
            hostile.edit_root(s, lambda p: (p.update(slot=7), p["generations"][1].update(slot=7))),
        ),
        ("slots/7/zarr.json: metadata is missing",),
    ),
    "a slot that is anywhere": (
        lambda s: hostile.edit_root(s, lambda p: p["generations"][1].update(slot=10**12)),
        ("generations[1].slot: found 1000000000000, expected an integer of at most",),
    ),
    "manifest of another store": (
        lambda s: hostile.edit_manifest(s, lambda m: m.update(uuid="0" * 32)),
        ("manifests/3/manifest.json: store, generation, parent, slot and step are",),
    ),
    "manifest of another generation": (
        lambda s: hostile.replace_manifest(s, (s / "manifests/2/manifest.json").read_bytes()),
        ("manifests/3/manifest.json: store, generation, parent, slot and step are",),
    ),
    "manifest of 100 MB": (
        lambda s: hostile.hole(s / "manifests/3/manifest.json", BIG),
        ("manifests/3/manifest.json: has 104857600 B, expected at most",),
    ),
    "manifest is a FIFO": (
        lambda s: hostile.fifo(s / "manifests/3/manifest.json"),
        ("manifests/3/manifest.json: is a FIFO, expected a file",),
    ),
    "manifest below a file": (
        lambda s: (shutil.rmtree(s / "manifests/3"), (s / "manifests/3").write_text("")),
        ("manifests/3/manifest.json: missing, though",),
    ),
    "a record of a name with folders": (
        lambda s: hostile.edit_manifest(s, lambda m: renamed(m, "../../up")),
        ("records: found '../../up', expected a name that matches",),
    ),
    "a record of a name with NUL": (
        lambda s: hostile.edit_manifest(s, lambda m: renamed(m, "a\0b")),
        ("records: found 'a\\x00b', expected a name that matches",),
    ),
    "a record that is longer than any drive": (
        lambda s: hostile.edit_manifest(
            s, lambda m: m["records"]["outer_in.master"].update(length=2**62)
        ),
        ("records.outer_in.master.length: found 4611686018427387904, expected at most",),
    ),
    "a record of more chunks than there is memory for": (
        lambda s: hostile.edit_manifest(
            s,
            lambda m: m["records"]["outer_in.weights"].update(
                length=2**58, count=2**38, shard_nbytes=2**40
            ),
        ),
        ("records.outer_in.weights.count",),
    ),
    "a record of more shards than are named": (
        lambda s: hostile.edit_manifest(
            s, lambda m: m["records"]["carried.U8.weights"].update(shard_nbytes=1, files=[1])
        ),
        ("records.carried.U8.weights.files: found (1,), expected 3 lengths",),
    ),
    "a shard of more than a drive": (
        lambda s: hostile.edit_manifest(
            s, lambda m: m["records"]["layer.000.weights"].update(files=[2**63 - 1])
        ),
        ("records.layer.000.weights.files[0]: found 9223372036854775807, expected from",),
    ),
    "checksums of the wrong length": (
        lambda s: hostile.replace_table(s, bytes(4)),
        ("checksums.bin: 4 B, expected",),
    ),
    "checksums without end": (
        lambda s: hostile.hole(s / "manifests/3/checksums.bin", 1 << 40),
        ("checksums.bin: has 1099511627776 B, expected at most",),
    ),
    "checksums are a FIFO": (
        lambda s: hostile.fifo(s / "manifests/3/checksums.bin"),
        ("checksums.bin: is a FIFO",),
    ),
    # metadata and links
    "manifests elsewhere": (
        lambda s: hostile.aside(s / "manifests", s.parent / "elsewhere"),
        ("manifests: is a link, expected a folder",),
    ),
    "slots elsewhere": (
        lambda s: hostile.aside(s / "slots", s.parent / "elsewhere"),
        ("slots: is a link, expected a folder",),
    ),
    "array of another shape": (
        lambda s: hostile.edit_array(s, "layer.000.weights", lambda d: d.update(shape=[2**40])),
        ("slots/2/layer.000.weights/zarr.json: shape: found [1099511627776], expected [",),
    ),
    "array of another type": (
        lambda s: hostile.edit_array(s, "outer_in.master", lambda d: d.update(data_type="int64")),
        ("slots/2/outer_in.master/zarr.json: data_type: found 'int64', expected 'float32'",),
    ),
    "array otherwise encoded": (
        lambda s: hostile.edit_array(s, "outer_in.master", lambda d: d.update(codecs=[])),
        ("slots/2/outer_in.master/zarr.json: codecs: found [], expected",),
    ),
    "array without attributes": (
        lambda s: hostile.edit_array(s, "outer_in.master", lambda d: d.pop("attributes")),
        ("slots/2/outer_in.master/zarr.json: attributes: missing",),
    ),
    "array metadata is a FIFO": (
        lambda s: hostile.fifo(s / "slots/2/outer_in.master/zarr.json"),
        ("slots/2/outer_in.master/zarr.json: is a FIFO",),
    ),
    "link to itself": (
        lambda s: hostile.link(s / LINK, "0"),
        (f"{LINK}: links to '0', expected ../../../../drives/N/{SHARD}",),
    ),
    "link to the system": (
        lambda s: hostile.link(s / LINK, "/etc/passwd"),
        (f"{LINK}: links to '/etc/passwd'",),
    ),
    "link through the drives": (
        lambda s: hostile.link(s / LINK, f"../../../../drives/0/../../x/{SHARD}"),
        (f"{LINK}: links to",),
    ),
    "link to a drive by another spelling": (
        lambda s: hostile.link(s / LINK, f"../../../../drives/٠/{SHARD}"),
        (f"{LINK}: links to",),
    ),
    "link to a drive that is not listed": (
        lambda s: hostile.link(s / LINK, f"../../../../drives/7/{SHARD}"),
        (f"{LINK}: links to", "with N one of 0, 1"),
    ),
    "link to another record": (
        lambda s: hostile.swap(s / LINK, s / "slots/2/layer.000.exp_avg/c/0"),
        ("slots/2/layer.000.", "links to", "expected"),
    ),
    "link to another slot": (
        lambda s: hostile.link(s / LINK, os.readlink(s / LINK).replace("/2.", "/1.")),
        (f"{LINK}: links to", f"expected ../../../../drives/N/{SHARD}"),
    ),
    "a folder for a link": (
        lambda s: ((s / LINK).unlink(), (s / LINK).mkdir()),
        (f"{LINK}: Invalid argument, expected a link to shard {SHARD}",),
    ),
    # drives
    "shard is a link": (
        lambda s: hostile.aside(drive(s) / SHARD, s.parent / "victim"),
        (f"drive 0: shard {{store}}/shards-0/{SHARD} is a link, expected a file",),
    ),
    "shard is a FIFO": (lambda s: hostile.fifo(drive(s) / SHARD), ("is a FIFO, expected a file",)),
    "shard is a device": (
        lambda s: hostile.link(drive(s) / SHARD, "/dev/zero"),
        ("is a link, expected a file",),
    ),
    "drive in the system": (
        lambda s: hostile.link(s / "drives/0", "/etc"),
        ("drive 0: folder /etc has no drive.json",),
    ),
    "drive is a loop": (
        lambda s: hostile.link(s / "drives/0", "../drives/0"),
        ("drive 0: folder {store}/drives/0 is missing",),
    ),
    "drive of another": (
        lambda s: hostile.link(s / "drives/0", "../shards-1"),
        ("drive.json: belongs to drive 1", "expected drive 0"),
    ),
    "label of another store": (
        lambda s: (drive(s) / "drive.json").write_text('{"uuid": "' + "0" * 32 + '", "drive": 0}'),
        ("drive.json: belongs to drive 0 of store 00000000",),
    ),
    "label is a FIFO": (
        lambda s: hostile.fifo(drive(s) / "drive.json"),
        ("drive.json: is a FIFO, expected a file",),
    ),
    "label without end": (
        lambda s: hostile.link(drive(s) / "drive.json", "/dev/zero"),
        ("drive.json: is a device, expected a file",),
    ),
    "label of 100 MB": (
        lambda s: hostile.hole(drive(s) / "drive.json", BIG),
        ("drive.json: has 104857600 B",),
    ),
    "label is a list": (
        lambda s: (drive(s) / "drive.json").write_text("[]"),
        ("drive.json: found list, expected an object",),
    ),
    # the schema
    "schema file above its folder": (
        lambda s: hostile.rename_schema(s, lambda i: i.update({"../../../x": "0" * 64})),
        ("schema file '../../../x': not a plain relative path",),
    ),
    "schema file of the system": (
        lambda s: hostile.rename_schema(s, lambda i: i.update({"/etc/passwd": "0" * 64})),
        ("schema file '/etc/passwd': not a plain relative path",),
    ),
    "schema file that is a folder": (
        lambda s: hostile.rename_schema(s, lambda i: i.update({".": "0" * 64})),
        ("schema file '.': not a plain relative path",),
    ),
    "schema file with NUL": (
        lambda s: hostile.rename_schema(s, lambda i: i.update({"a\0b": "0" * 64})),
        ("schema file 'a\\x00b': not a plain relative path",),
    ),
    "schema file that has no name": (
        lambda s: hostile.rename_schema(s, lambda i: i.update({"a" * 2000: "0" * 64})),
        ("not a plain relative path",),
    ),
    "schema digest that is none": (
        lambda s: hostile.rename_schema(s, lambda i: i.update({"config.json": "../x"})),
        ("files.config.json: found '../x', expected text that matches",),
    ),
    "no schema": (
        lambda s: hostile.rename_schema(s, lambda i: i.pop("schema.json")),
        ("no schema.json among its schema files",),
    ),
    "a side file less": (
        lambda s: hostile.rename_schema(s, lambda i: i.pop("config.json")),
        ("side file config.json is not in the store",),
    ),
    "schema of a newer format": (
        lambda s: hostile.edit_schema(s, lambda d: d.update(format=2)),
        ("schema.json: written in format 2, this program reads up to format 1",),
    ),
    "schema of brackets": (
        lambda s: hostile.replace_schema(s, b"[" * 1_000_000),
        ("schema.json: no valid JSON",),
    ),
    "schema of other records": (
        lambda s: hostile.edit_schema(s, lambda d: d["units"][3].update(name="other")),
        ("record other.exp_avg is in the schema but not in the store",),
    ),
    "schema of longer records": (
        lambda s: hostile.edit_schema(s, lambda d: d["units"][3]["tensors"][0].update(shape=[999])),
        ("record outer_out.exp_avg is not what the schema says",),
    ),
    "schema of a unit elsewhere": (
        lambda s: hostile.edit_schema(s, lambda d: d["units"][3].update(name="../../x")),
        ("schema.json: record name '../../x.weights' does not match",),
    ),
    "schema with a tensor larger than anything": (
        lambda s: hostile.edit_schema(
            s, lambda d: d["units"][3]["tensors"][0].update(shape=[2**62, 2**62])
        ),
        ("schema.json: record outer_out.weights: ", "elements are too many"),
    ),
    "schema is a FIFO": (
        lambda s: hostile.fifo(next((s / "schema").glob("*/schema.json"))),
        ("schema.json: is a FIFO, expected a file",),
    ),
}


def renamed(manifest: Any, name: str) -> None:
    manifest["records"][name] = manifest["records"].pop("outer_in.master")
    manifest["metadata"][f"{name}/zarr.json"] = manifest["metadata"].pop(
        "outer_in.master/zarr.json"
    )
    first = 0
    for entry in manifest["records"].values():
        entry["first"] = first
        first += entry["count"]


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_store_is_refused_with_file_found_and_expected(store, name):
    change, words = FILES[name]
    change(store)
    with PeakMeter() as meter:
        meter.lap()
        before = meter.lap()
        said = refusal(store)
        grown = meter.lap() - before
    assert grown < ROOM
    for word in words:
        assert word.format(store=store) in said
    schema = "schema" in name or "side file" in name
    if not schema:  # what a writer does not look at, whoever wants it does
        with pytest.raises(RefusedError) as caught:
            open_writer(store)
        assert caught.value.exit_code == 3


def test_line_ends_of_windows_do_not_matter_to_the_root(store):
    text_of(lambda text: text.replace("\n", "\r\n").encode())(store)
    with open_reader(store) as reader:
        assert reader.manifest.step == 30


def test_line_ends_of_windows_are_damage_to_a_manifest(store):
    path = store / "manifests/3/manifest.json"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert "manifests/3/manifest.json: found sha256" in refusal(store)


def test_two_generations_in_one_slot_are_not_read_as_one_another(store):
    def overlap(document: Any) -> None:
        document.update(slot=1)

    hostile.edit_manifest(store, overlap)
    hostile.edit_root(store, lambda p: (p.update(slot=1), p["generations"][1].update(slot=1)))
    said = refusal(store, "export", str(store.parent / "out"))
    assert "drive" in said
    assert "--generation 2" in said
    assert not (store.parent / "out").exists()


# -- what a writer must not touch ----------------------------------------------------------------


def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(store, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (store / "LOCK").symlink_to(victim)
    with pytest.raises(RefusedError, match="LOCK: is a link, expected a file"):
        open_writer(store)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["FIFO", "folder"])
def test_a_lock_that_is_no_file_is_refused(store, make):
    make(store / "LOCK")
    with pytest.raises(RefusedError, match=r"LOCK: is a (FIFO|folder), expected a file"):
        open_writer(store)
    result = CliRunner().invoke(cli, ["inspect", str(store)])
    assert result.exit_code in (0, 3, 5), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_manifest_nobody_lists_may_be_anything(store):
    for number, make in ((7, hostile.fifo), (8, Path.mkdir), (9, lambda p: p.symlink_to("/etc"))):
        (store / "manifests" / str(number)).mkdir()
        make(store / "manifests" / str(number) / "manifest.json")
    with contextlib.suppress(MegatrainError):  # a lock that cannot be taken
        open_writer(store).close()
    with open_reader(store) as reader:
        assert reader.manifest.step == 30


def test_slots_and_manifests_that_are_links_lose_nothing_elsewhere(store, tmp_path):
    precious = tmp_path / "precious"
    (precious / "deep").mkdir(parents=True)
    (precious / "deep" / "file").write_text("mine")
    (precious / "manifest.json").write_text("{}")
    (store / "slots" / "5").symlink_to(precious)
    (store / "manifests" / "9").symlink_to(precious)
    with open_writer(store) as writer:
        writer.drop_free_slots()
        writer.ensure_slots(3)
    assert (precious / "deep" / "file").read_text() == "mine"
    assert (precious / "manifest.json").read_text() == "{}"
