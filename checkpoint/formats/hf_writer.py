"""Writing a Hugging Face folder: streaming, durable, and there at once or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from checkpoint.formats.hf import CONFIG, INDEX, SINGLE
from checkpoint.formats.safetensors import MAX_HEADER_NBYTES, encode_header, tensor_nbytes
from tiering import fsops
from tiering.errors import CapacityError, RefusedError, StorageError

METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """A tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of its bytes."""
        return tensor_nbytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputShard:
    """A file to write; ``tensors`` are in the order of their bytes."""

    file: str
    tensors: tuple[OutputTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


Content = Callable[[OutputTensor], Iterable[memoryview]]
"""Yields a tensor's bytes in order; each piece is used before the next is asked for."""


def plan_shards(tensors: Sequence[OutputTensor], max_nbytes: int) -> tuple[OutputShard, ...]:
    """Return the files for ``tensors``: one if they fit, else files of at most ``max_nbytes``.

    A tensor that is larger than that has a file of its own.
    """
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > max_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    return tuple(
        OutputShard(file=_file_name(number, len(groups)), tensors=tuple(_in_file_order(group)))
        for number, group in enumerate(groups, start=1)
    )


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _in_file_order(tensors: Sequence[OutputTensor]) -> list[OutputTensor]:
    """Return the reference library's order: widest elements first, so all are aligned; then names.

    A file of it that is converted and exported is the same file again, byte for byte.
    """
    return sorted(tensors, key=lambda tensor: (-tensor_nbytes(tensor.dtype, (8,)), tensor.name))


def encode_index(shards: Sequence[OutputShard]) -> bytes:
    """Return the content of the index of a model in several files."""
    weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    document = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def write_folder(
    folder: Path,
    shards: Sequence[OutputShard],
    side_files: Mapping[str, bytes],
    content: Content,
) -> None:
    """Fill the empty ``folder`` with a model; every file in it is durable."""
    for shard in shards:
        _write_shard(folder / shard.file, shard, content)
    for name, data in side_files.items():
        _write_side_file(folder, PurePosixPath(name), data)
    if len(shards) > 1:
        fsops.write_file(folder / INDEX, encode_index(shards))
    fsops.fsync_dir(folder)


def _write_side_file(folder: Path, name: PurePosixPath, data: bytes) -> None:
    for parent in reversed(name.parents[:-1]):
        if not (folder / parent).is_dir():
            fsops.make_dir(folder / parent)
            fsops.fsync_dir((folder / parent).parent)
    fsops.write_file(folder / name, data)
    if name.parent.parts:
        fsops.fsync_dir(folder / name.parent)


def _write_shard(path: Path, shard: OutputShard, content: Content) -> None:
    entries = ((tensor.name, tensor.dtype, tensor.shape) for tensor in shard.tensors)
    header = encode_header(entries, METADATA)
    if len(header) > MAX_HEADER_NBYTES:
        raise RefusedError(
            f"{path.name}: {len(shard.tensors)} tensors need a header of {len(header)} B, "
            f"readers allow {MAX_HEADER_NBYTES} B; lower --max-shard-size"
        )
    with closing(fsops.NewFile(path)) as file:
        try:
            file.append(header)
            for tensor in shard.tensors:
                _append(file, tensor, content(tensor))
        except StorageError as error:
            if error.path != path:  # what was to be written could not be read
                raise
            raise StorageError(
                "write",
                path,
                errno=error.errno,
                offset=file.nbytes,
                wanted=len(header) + shard.nbytes,
                moved=file.nbytes,
            ) from error
    fsops.fsync_file(path)


def _append(file: fsops.NewFile, tensor: OutputTensor, pieces: Iterable[memoryview]) -> None:
    start = file.nbytes
    for piece in pieces:
        file.append(piece)
    if file.nbytes - start != tensor.nbytes:
        moved = file.nbytes - start
        raise StorageError("write", file.path, wanted=tensor.nbytes, moved=moved)


@contextmanager
def new_folder(out: Path, *, overwrite: bool, nbytes: int) -> Iterator[Path]:
    """Yield an empty folder beside ``out`` that becomes ``out`` at the end of the block.

    After an exception ``out`` is what it was. ``nbytes`` is what will be written.

    Raises:
        RefusedError: ``out`` exists and may not be replaced.
        CapacityError: Its drive has too little room.
    """
    out = Path(os.path.abspath(out))  # resolve() would write through a link at ``out``
    _check_target(out, overwrite=overwrite)
    fsops.make_dirs(out.parent)
    if (free := shutil.disk_usage(out.parent).free) < nbytes:
        raise CapacityError(f"{out.parent}: need {nbytes} B, {free} B free")
    temporary = out.parent / f".{out.name}.partial-{secrets.token_hex(4)}"
    fsops.make_dir(temporary)
    try:
        yield temporary
        _move_into_place(temporary, out)
    except BaseException:
        fsops.remove_tree(temporary)
        raise


def _check_target(out: Path, *, overwrite: bool) -> None:
    if out.is_symlink():
        raise RefusedError(f"{out}: is a link; name the folder itself")
    if not out.exists():
        return
    if not out.is_dir():
        raise RefusedError(f"{out}: exists and is not a folder")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise RefusedError(f"{out}: exists; use --overwrite to replace it")
    if not (out / CONFIG).is_file():
        raise RefusedError(f"{out}: is no model folder (no {CONFIG}); not replaced")


def _move_into_place(temporary: Path, out: Path) -> None:
    """Give the new folder its name; the one that had it is removed when that is durable."""
    replaces = out.exists()
    if replaces:
        _swap(temporary, out)
    else:
        fsops.replace(temporary, out)
    try:
        fsops.fsync_dir(out.parent)
    except BaseException:
        if replaces:
            _swap(temporary, out)
        else:
            fsops.replace(out, temporary)
        raise
    fsops.remove_tree(temporary)


def _swap(one: Path, other: Path) -> None:
    """Exchange the names of two folders; in one step where the file system has one for it."""
    if fsops.exchange(one, other):
        return
    aside = one.with_name(f"{one.name}.old")
    with ExitStack() as undo:
        for old, new in ((other, aside), (one, other), (aside, one)):
            fsops.replace(old, new)
            undo.callback(fsops.replace, new, old)
        undo.pop_all()
