from __future__ import annotations

from pathlib import Path

import pytest

from tiering.backends.open_files import OpenFiles


class Opened:
    """A file that knows whether it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


def open_files(capacity: int) -> OpenFiles[Opened]:
    return OpenFiles(Opened, Opened.close, capacity)


def use(files: OpenFiles[Opened], name: str) -> Opened:
    with files.lease(Path(name)) as file:
        assert not file.closed
        return file


def test_a_file_stays_open_and_the_longest_unused_goes_first() -> None:
    files = open_files(2)
    a, b = use(files, "a"), use(files, "b")
    assert use(files, "a") is a
    use(files, "c")
    assert (a.closed, b.closed) == (False, True)
    assert use(files, "b") is not b


def test_a_file_in_use_is_not_closed_to_make_room() -> None:
    files = open_files(1)
    with files.lease(Path("a")) as a:
        for name in "bc":
            use(files, name)
        assert not a.closed
    files.close()
    assert a.closed


def test_a_forgotten_file_is_closed_after_its_last_user_and_opened_anew() -> None:
    files = open_files(2)
    with files.lease(Path("a")) as old:
        files.forget(Path("a"))
        assert not old.closed
        with files.lease(Path("a")) as new:
            assert new is not old
    assert old.closed
    assert not new.closed
    files.forget(Path("a"))
    assert new.closed
    files.forget(Path("never opened"))


def test_what_cannot_be_opened_is_not_kept() -> None:
    answers = iter([OSError(2, "absent"), None])

    def open_file(path: Path) -> Opened:
        if error := next(answers):
            raise error
        return Opened(path)

    files = OpenFiles(open_file, Opened.close, 2)
    with pytest.raises(OSError, match="absent"), files.lease(Path("a")):
        pass
    use(files, "a")
    files.close()
