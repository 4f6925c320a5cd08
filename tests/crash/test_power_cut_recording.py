"""The recorder and the enumerator themselves: what they see, and what they hold possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.libcuda import require_kvikio
from tests.support.power_cut import NEVER, History, Recording
from tests.support.power_cut_images import THOROUGH, Search, Violation
from tests.support.tiering_stores import memory_folder
from tiering import fsops
from tiering.backends.posix import PIECE_NBYTES, PosixBackend
from tiering.backends.probe import probe
from tiering.errors import StorageError
from tiering.recordio import Backend
from tiering.testing import aligned_buffer

NBYTES = PIECE_NBYTES + 4096


def _posix(folder: Path) -> Backend:
    return PosixBackend("test", direct=False, writable=True)


def _kvikio(folder: Path) -> Backend:
    require_kvikio()
    if not probe(folder).direct:
        pytest.skip("no direct I/O here")
    from tiering.backends.kvikio import KvikioBackend

    return KvikioBackend("test", writable=True)


def test_a_step_is_recorded_from_before_its_operation_until_after_it(tmp_path: Path) -> None:
    path, seen = tmp_path / "folder", []

    def look() -> None:
        seen.append(path.exists())

    def recorder(_operation: fsops.Operation) -> Callable[[], None]:
        look()
        return look

    with fsops.recorded(recorder):
        fsops.make_dir(path)
    assert seen == [False, True]


@pytest.mark.parametrize("make", [_posix, _kvikio])
def test_a_backends_write_is_recorded_from_its_submission_to_its_end(
    tmp_path: Path, make: Callable[[Path], Backend]
) -> None:
    path, data = tmp_path / "file", aligned_buffer(NBYTES, seed=1)
    path.write_bytes(b"")
    backend = make(tmp_path)
    recording = Recording(tmp_path)
    with recording.running():
        futures = [backend.write(path, 0, data), backend.write(path, NBYTES, data)]
        for future in futures:
            future.result()
        fsops.fsync_file(path)
    fsync = next(step for step in recording.steps if step.operation.action == "fsync")
    writes = [step for step in recording.steps if step.operation.action == "write"]
    assert all(step.begin < step.end < fsync.begin for step in writes)
    assert History(recording).visible() == {"file": bytes(data) * 2}
    backend.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [_posix, _kvikio])
def test_a_write_that_fails_is_never_taken_for_durable(
    tmp_path: Path, make: Callable[[Path], Backend]
) -> None:
    backend = make(tmp_path)
    recording = Recording(tmp_path)
    with recording.running(), pytest.raises(StorageError):
        backend.write(tmp_path / "absent", 0, aligned_buffer(4096)).result()
    assert [step.end for step in recording.steps] == [NEVER]
    backend.close()  # type: ignore[attr-defined]


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


OLD, NEW = b"o" * 700, b"n" * 1500


def _replace(folder: Path, *, sync_file: bool, sync_folder: bool) -> Recording:
    """Replace a file by renaming another over it."""
    (folder / "file").write_bytes(OLD)
    recording = Recording(folder)
    recording.allow({OLD, NEW})
    with recording.running():
        (fsops.write_file if sync_file else fsops.create_file)(folder / "new", NEW)
        fsops.replace(folder / "new", folder / "file")
        if sync_folder:
            fsops.fsync_dir(folder)
        recording.allow({NEW})
    return recording


def _found(recording: Recording, folder: Path) -> set[bytes]:
    """Return all that a power cut may leave in the file."""
    found = set()

    def check(allowed: set[bytes]) -> None:
        content = (folder / "file").read_bytes()
        found.add(content)
        assert content in allowed

    Search(check=check, bounds=THOROUGH, collect=True).run(History(recording))
    return found


def test_a_synced_file_renamed_in_a_synced_folder_is_the_old_or_the_new_one(folder: Path) -> None:
    recording = _replace(folder, sync_file=True, sync_folder=True)
    assert _found(recording, folder) == {OLD, NEW}


def test_a_file_that_was_not_synced_may_be_empty_zeros_torn_or_short(folder: Path) -> None:
    found = _found(_replace(folder, sync_file=False, sync_folder=True), folder)
    zeros = bytes(len(NEW))
    assert {b"", zeros, NEW[:512], bytes(512) + NEW[512:], OLD, NEW} <= found


def test_a_name_that_was_not_synced_may_be_lost(folder: Path) -> None:
    recording = _replace(folder, sync_file=True, sync_folder=False)

    def check(allowed: set[bytes]) -> None:
        assert (folder / "file").read_bytes() in allowed

    with pytest.raises(Violation, match=r"cut after \['rename .*/file'\], all lost"):
        Search(check=check).run(History(recording))


def test_names_in_a_folder_are_lost_one_by_one(folder: Path) -> None:
    recording = Recording(folder)
    recording.allow(None)
    with recording.running():
        for name in "abc":
            fsops.make_dir(folder / name)
    found = set()

    def check(_: object) -> None:
        found.add(frozenset(path.name for path in folder.iterdir()))

    Search(check=check, bounds=THOROUGH).run(History(recording))
    assert len(found) == 8
