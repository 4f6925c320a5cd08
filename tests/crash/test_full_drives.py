"""Real file systems without room, or that fail: refused, or gone on with when they are well."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.trainer import Row
from tests.support.children import Children, Ended
from tests.support.loops import Mount, loop_mount
from tests.support.programs import content
from tests.support.runs import numbers, run_config, tiny_llama, token_rows

KIB = 1 << 10
SMALL = 16 << 20


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    return tiny_llama(folder / "model"), token_rows(folder / "rows.jsonl")


@pytest.fixture(name="drive")
def _drive(tmp_path: Path) -> Iterator[Mount]:
    with loop_mount(tmp_path, nbytes=SMALL) as mount:
        yield mount


def fill(folder: Path, leaving: int) -> Path:
    """Leave ``leaving`` free bytes, about; return what takes the others."""
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        while (taken := free_nbytes(folder) - leaving) > 0:
            os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), taken)
    return ballast


def free_nbytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def write_run(inputs: tuple[Path, Path], out: Path, drive: Path | None, **changes: object) -> Path:
    drives = {"store__drives": [str(drive)]} if drive else {}
    path = out.with_suffix(".yaml")
    settings = {"memory__resident": 1, "train__accumulate": 1, **drives, **changes}
    path.write_text(run_config(*inputs, out, **settings).to_json())
    return path


def undisturbed(children: Children, inputs: tuple[Path, Path], folder: Path) -> tuple[object, ...]:
    ended = children.run(["megatrain", "train", write_run(inputs, folder / "whole", None)])
    assert ended.code == 0, ended.err
    return outcome(folder / "whole")


def outcome(out: Path) -> tuple[object, ...]:
    return {**content(out / "store"), "state": ""}, numbers(out)  # the settings differ in places


def test_slots_that_do_not_fit_are_refused_before_the_first_step(
    tmp_path: Path, children: Children, inputs: tuple[Path, Path], drive: Mount
) -> None:
    run_file = write_run(inputs, tmp_path / "run", drive.point)
    ballast = fill(drive.point, 300 * KIB)
    ended = children.run(["megatrain", "train", run_file])
    assert ended.code == 3
    assert "drive 0 full: the slots do not fit\n" in ended.err
    need, free, folder = ended.err.splitlines()[-1].split()[1:]
    assert int(need) > int(free) == free_nbytes(drive.point)
    assert Path(folder).parent == drive.point
    assert numbers(tmp_path / "run") == []
    ballast.unlink()
    assert children.run(["megatrain", "train", run_file]).code == 0
    assert outcome(tmp_path / "run") == undisturbed(children, inputs, tmp_path)


def test_a_run_with_fewer_slots_fits_where_one_with_more_was_refused(
    tmp_path: Path, children: Children, inputs: tuple[Path, Path], drive: Mount
) -> None:
    run_file = write_run(inputs, tmp_path / "run", drive.point)
    command = ["megatrain", "train", run_file, "--set"]
    fill(drive.point, 2 << 20)
    ended = children.run([*command, "store.spare_slots=9"])
    assert ended.code == 3
    assert "drive 0 full: the slots do not fit\n" in ended.err
    ended = children.run([*command, "store.spare_slots=0"])
    assert ended.code == 0, ended.err
    assert len(list((tmp_path / "run/store/slots").glob("[0-9]*"))) == 2


def test_a_run_that_met_a_full_drive_goes_on_when_there_is_room(
    tmp_path: Path, children: Children, inputs: tuple[Path, Path], drive: Mount
) -> None:
    changes = {"store__reserve": False, "memory__gradients": "ram"}
    run_file = write_run(inputs, tmp_path / "run", drive.point, **changes)
    ballast = fill(drive.point, 500 * KIB)
    ended = children.run(["megatrain", "train", run_file])
    assert_full(ended, drive.point)
    assert content(tmp_path / "run" / "store")["step"] == 1
    ballast.unlink()
    ended = children.run(["megatrain-ckpt", "resume", tmp_path / "run"])
    assert ended.code == 0, ended.err
    assert outcome(tmp_path / "run") == undisturbed(children, inputs, tmp_path)


def assert_full(ended: Ended, folder: Path) -> None:
    last = ended.err.splitlines()[-1]
    assert ended.code == 5, ended.err
    assert last.startswith(f"error: cannot write {folder}/")
    assert "No space left on device" in last
    assert last.endswith(" B free")


def test_an_export_that_does_not_fit_leaves_nothing(
    tmp_path: Path, children: Children, inputs: tuple[Path, Path], drive: Mount
) -> None:
    store, out = tmp_path / "store", drive.point / "out"
    assert children.run(["megatrain-ckpt", "convert", inputs[0], store]).code == 0
    fill(drive.point, 20 * KIB)
    ended = children.run(["megatrain-ckpt", "export", store, out])
    assert ended.code == 3
    assert f"{drive.point}: need " in ended.err
    assert not list(drive.point.glob("*out*"))


def test_a_limit_on_the_length_of_files_is_told_like_a_full_drive(
    tmp_path: Path, children: Children, inputs: tuple[Path, Path]
) -> None:
    store = tmp_path / "store"
    words = ["megatrain-ckpt", "convert", inputs[0], store]
    ended = children.run(["tests.crash.test_full_drives:limited", 8 * KIB, *words])
    assert ended.code == 5
    assert "File too large" in ended.err
    assert not store.exists()


def limited(nbytes: str, name: str, *words: str) -> None:
    """Run a command that may make no file longer than ``nbytes``."""
    from megatrain.ckpt_cli import cli

    resource.setrlimit(resource.RLIMIT_FSIZE, (int(nbytes), int(nbytes)))
    cli(words)


def test_a_drive_that_keeps_no_promise_of_room_is_named(
    tmp_path: Path, children: Children, inputs: tuple[Path, Path]
) -> None:
    with loop_mount(tmp_path, filesystem="btrfs") as mount:
        run_file = write_run(inputs, tmp_path / "run", mount.point, train__steps=1)
        ended = children.run(["megatrain", "train", run_file])
    assert ended.code == 0, ended.err
    said = " ".join(ended.err.split())
    assert f"{mount.point}/megatrain-" in said
    assert "is copy-on-write: reserved blocks do not keep" in said


def test_a_run_whose_drive_the_kernel_made_read_only_goes_on_when_it_is_repaired(
    tmp_path: Path, children: Children, inputs: tuple[Path, Path]
) -> None:
    with loop_mount(tmp_path, nbytes=SMALL, options="errors=remount-ro") as mount:
        trigger = Path("/sys/fs/ext4", mount.device.name, "trigger_fs_error")
        if not os.access(trigger, os.W_OK):
            pytest.skip("ext4 cannot be told here to fail")
        run_file = write_run(inputs, tmp_path / "run", mount.point)
        ended = children.run(
            ["tests.crash.test_full_drives:broken_after_two_steps", trigger, "train", run_file]
        )
        last = ended.err.splitlines()[-1]
        assert ended.code == 5, ended.err
        assert last.startswith("error: cannot ")
        assert f" {mount.point}/megatrain-" in last
        assert last.endswith(("Read-only file system", "Input/output error"))
        assert content(tmp_path / "run" / "store")["step"] in (1, 2)
        subprocess.run(["umount", mount.point], check=True)
        subprocess.run(["fsck.ext4", "-y", mount.device], capture_output=True)
        subprocess.run(["mount", mount.device, mount.point], check=True)
        ended = children.run(["megatrain-ckpt", "resume", tmp_path / "run"])
        assert ended.code == 0, ended.err
        assert outcome(tmp_path / "run") == undisturbed(children, inputs, tmp_path)


def broken_after_two_steps(trigger: str, *words: str) -> None:
    """Run a command whose file system meets an error of its own when the second step is made."""
    from megatrain import progress
    from megatrain.cli import cli

    on_step = progress.Terminal.on_step

    def on_step_and_break(terminal: progress.Terminal, row: Row) -> None:
        on_step(terminal, row)
        if row["step"] == 2:
            Path(trigger).write_text("broken by a test")

    progress.Terminal.on_step = on_step_and_break  # type: ignore[method-assign]
    cli(words)
