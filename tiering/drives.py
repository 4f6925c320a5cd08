"""The drives of a store: planning, making, opening and removing them."""

from __future__ import annotations

import logging
import os
import pwd
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tiering import fsops
from tiering.drive import Drive, link_of
from tiering.errors import CorruptionError, MegatrainError, RefusedError
from tiering.labels import LABEL, expected_label, read_label
from tiering.ownership import find_other, owner_for, unfinished_label

_log = logging.getLogger(__name__)

NEW_LINK = "link.new"
_NAMED = 3  # records that a message about a missing drive lists


# -- planning ------------------------------------------------------------------------------------


def plan_drives(store: Path, uuid: str, parents: Sequence[Path]) -> tuple[Drive, ...]:
    """Return the drives that a new store would have; creates nothing.

    Raises:
        RefusedError: A parent is no folder (a file system that is not mounted?), cannot be
            written or comes twice.
    """
    if not parents:
        return (Drive(number=0, folder=store / "shards", link="../shards"),)
    return tuple(find_drives(store, uuid, parents, ()))


def find_drives(
    store: Path, uuid: str, folders: Sequence[Path], present: Sequence[Drive]
) -> Iterator[Drive]:
    """Yield the drive that is meant by each folder: one of ``present``, or one to be created.

    A present drive is named by its folder or by the folder above it. The store itself means the
    folder inside it that a store without drives of its own has.

    Raises:
        RefusedError: As :func:`plan_drives`.
    """
    taken = {drive.number for drive in present}
    used: list[Drive] = []
    for folder in map(Path, map(os.path.abspath, folders)):
        require_folder(folder)
        drive = _present_drive(folder, present)
        if drive is None:
            number = min(set(range(len(taken) + 1)) - taken)
            drive = _new_drive(store, uuid, folder, number)
        if any(_is_same(drive, other) for other in used):
            raise RefusedError(f"drive {folder}: given twice")
        taken.add(drive.number)
        used.append(drive)
        yield drive


def _is_same(one: Drive, other: Drive) -> bool:
    """Whether two drives are one folder, which need not be there yet."""
    named_alike = one.folder.name == other.folder.name
    return named_alike and one.folder.parent.samefile(other.folder.parent)


def require_folder(folder: Path) -> None:
    """Refuse what a drive cannot be made in: no folder, or one that this user may not write."""
    if not folder.is_dir():
        raise RefusedError(f"drive {folder}: no such folder; nothing is created there")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise RefusedError(f"drive {folder}: user {_user()} cannot write there")


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _present_drive(folder: Path, present: Sequence[Drive]) -> Drive | None:
    exact = [drive for drive in present if folder.samefile(drive.folder)]
    below = [drive for drive in present if folder.samefile(drive.folder.parent)]
    if not exact and len(below) > 1:
        numbers = ", ".join(str(drive.number) for drive in below)
        raise RefusedError(f"drive {folder}: drives {numbers} are there; name the folder of one")
    return next(iter([*exact, *below]), None)


def _new_drive(store: Path, uuid: str, parent: Path, number: int) -> Drive:
    if store.is_dir() and parent.samefile(store):
        drive = Drive(number=number, folder=store / "shards", link="../shards")
    else:
        folder = parent / f"megatrain-{uuid[:8]}"
        drive = Drive(number=number, folder=folder, link=str(folder))
    if drive.folder.exists():
        raise RefusedError(f"drive {drive.folder}: exists and is no drive of {store}")
    return drive


# -- making and removing ---------------------------------------------------------------------------


def create_drive(store: Path, uuid: str, drive: Drive) -> None:
    """Create the store's link to ``drive`` and its folder with its label, all of it durable."""
    fsops.symlink(drive.link, link_of(store, drive.number))
    fsops.fsync_dir(store / "drives")  # first: by the link the folder is found after a crash
    fsops.make_dir(drive.folder)
    fsops.write_file(drive.label, expected_label(uuid, drive.number, owner_for(store, drive)))
    fsops.fsync_dir(drive.folder)
    fsops.fsync_dir(drive.folder.parent)


def drop_drive(store: Path, uuid: str, drive: Drive) -> None:
    """Remove a drive that the durable root does not list: its folder, then the link to it.

    A folder that holds anything but our label is left, without the label.
    """
    if is_ours(store, uuid, drive.number, drive.folder):
        fsops.unlink(unfinished_label(drive.folder), missing_ok=True)
        others = sorted({entry.name for entry in drive.folder.iterdir()} - {LABEL})
        fsops.unlink(drive.label, missing_ok=True)
        if others:
            _log.warning("%s: not removed, it holds %s", drive.folder, others[0])
        else:
            fsops.remove_dir(drive.folder)
            fsops.fsync_dir(drive.folder.parent)
    else:
        settle_removal(drive.folder)
    fsops.unlink(link_of(store, drive.number))
    fsops.fsync_dir(store / "drives")


def settle_removal(folder: Path) -> None:
    """Make durable that a folder is gone, if it is: a kill may have come before that was."""
    if not folder.exists() and folder.parent.is_dir():
        fsops.fsync_dir(folder.parent)


def is_ours(store: Path, uuid: str, number: int, folder: Path) -> bool:
    """Whether a folder was made as a drive of this store; the label is its first file."""
    if not folder.is_dir():
        return False
    try:
        return read_label(folder) == (uuid, number) and find_other(store, number, folder) is None
    except (FileNotFoundError, MegatrainError):
        return {entry.name for entry in folder.iterdir()} <= {LABEL}


def unlisted_drives(store: Path, listed: Mapping[int, float]) -> list[Drive]:
    """Return what the links are to that a kill left without a place in the root."""
    found = []
    for link in sorted((store / "drives").iterdir()):
        if link.is_symlink() and link.name.isdecimal() and int(link.name) not in listed:
            found.append(_linked_drive(link, int(link.name), 0.0))
    return found


# -- opening -----------------------------------------------------------------------------------


def replace_link(store: Path, link: Path, target: str) -> None:
    """Make a link of the store say ``target``, in one step; durable when this returns."""
    new = store / NEW_LINK
    fsops.unlink(new, missing_ok=True)
    fsops.symlink(target, new)
    fsops.replace(new, link)
    fsops.fsync_dir(link.parent)


def open_drives(store: Path, uuid: str, shares: Mapping[int, float]) -> tuple[Drive, ...]:
    """Return the drives that a root lists, after checking that each is there and is its own.

    Raises:
        CorruptionError: A drive is missing, empty or another; the message names records on it.
    """
    return tuple(_open_drive(store, uuid, number, share) for number, share in shares.items())


def _open_drive(store: Path, uuid: str, number: int, share: float) -> Drive:
    link = link_of(store, number)
    try:
        drive = _linked_drive(link, number, share)
    except OSError as error:
        raise CorruptionError(
            f"drive {number}: {link} is no link: {error.strerror}", file=link, drive=number
        ) from error
    if not drive.folder.is_dir():
        raise _lost(store, drive, "is missing", link)
    try:
        found = read_label(drive.folder)
    except FileNotFoundError as error:
        state = f"has no {LABEL}" if any(drive.folder.iterdir()) else "is empty"
        raise _lost(store, drive, state, drive.label) from error
    except CorruptionError as error:
        raise CorruptionError(str(error), file=error.file, drive=number) from error
    if found != (uuid, number):
        raise CorruptionError(
            f"{drive.label}: belongs to drive {found[1]} of store {found[0]}, expected "
            f"drive {number} of store {uuid}, as {link} leads there",
            file=drive.label,
            drive=number,
        )
    return drive


def _linked_drive(link: Path, number: int, share: float) -> Drive:
    target = os.readlink(link)
    folder = Path(os.path.normpath(link.parent / target))
    return Drive(number=number, folder=folder, link=target, share=share)


def _lost(store: Path, drive: Drive, state: str, file: Path) -> CorruptionError:
    names = _records_on(store, drive.number)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    listed = f" ({', '.join(names[:_NAMED])}{more})" if names else ""
    return CorruptionError(
        f"drive {drive.number}: folder {drive.folder} {state}; is its file system mounted? "
        f"{len(names)} records need it{listed}. The link is {link_of(store, drive.number)}; "
        f"if the folder was moved: megatrain-ckpt attach {store} --drive FOLDER",
        file=file,
        drive=drive.number,
    )


def _records_on(store: Path, number: int) -> list[str]:
    """Return the names of the records that have a shard on a drive, by the links alone."""
    prefix = f"../../../../drives/{number}/"
    return sorted(
        {
            link.parent.parent.name
            for link in (store / "slots").glob("*/*/c/*")
            if link.is_symlink() and os.readlink(link).startswith(prefix)
        }
    )
