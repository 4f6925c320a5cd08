"""From a generation of a store to a Hugging Face folder, tensor by tensor in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpoint.checked import CheckedReader, read_schema
from checkpoint.codec import encode
from checkpoint.formats.files import parse_object
from checkpoint.formats.hf import CONFIG
from checkpoint.formats.hf_writer import OutputTensor, new_folder, plan_shards, write_folder
from checkpoint.scales import FP8
from checkpoint.schema import Role, Schema, Tensor, Unit
from tiering.errors import RefusedError
from tiering.store import StoreReader, open_reader

MAX_SHARD_NBYTES = 5_000_000_000
DTYPES: Mapping[str, str | None] = {"source": None, "bfloat16": "BF16", "float32": "F32"}
"""What parameters can be exported as; None keeps the data type that each one came in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote."""

    generation: int
    step: int
    files: tuple[str, ...]
    tensors: int
    nbytes: int


def export_hf(
    store: Path,
    out: Path,
    *,
    dtype: str = "source",
    max_shard_size: int = MAX_SHARD_NBYTES,
    generation: int | None = None,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Make ``out`` a Hugging Face folder with the weights of a generation, the newest by default.

    It appears under its name when it is complete and durable. What was BF16 comes from the
    weights, other parameters from the masters; each chunk is compared with its checksum.

    Raises:
        RefusedError: The store cannot be read, or ``out`` may not be written.
        CorruptionError: Bytes of the store are not what was committed.
    """
    _check_apart(store, out)
    with closing(open_reader(store, generation=generation)) as reader:
        schema = read_schema(reader)
        exporter = _Exporter(reader, schema, DTYPES[dtype], on_progress)
        shards = plan_shards(exporter.tensors, max_shard_size)
        side_files = _side_files(reader, schema, dtype)
        nbytes = sum(shard.nbytes for shard in shards)
        with new_folder(out, overwrite=overwrite, nbytes=nbytes) as folder:
            write_folder(folder, shards, side_files, exporter.content)
        return Exported(
            generation=reader.manifest.generation,
            step=reader.manifest.step,
            files=tuple(shard.file for shard in shards),
            tensors=len(exporter.tensors),
            nbytes=nbytes,
        )


def _check_apart(store: Path, out: Path) -> None:
    inside, outside = out.resolve(), store.resolve()
    if inside.is_relative_to(outside) or outside.is_relative_to(inside):
        raise RefusedError(f"{out}: overlaps the store {store}; choose another folder")


class _Exporter:
    """Produces the bytes of a model's tensors from a store."""

    def __init__(
        self,
        reader: StoreReader,
        schema: Schema,
        dtype: str | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._checked = CheckedReader(reader)
        self._schema = schema
        self._dtype = dtype
        self._on_progress = on_progress
        self._done = 0
        self.tensors = tuple(self._outputs())
        self._nbytes = sum(tensor.nbytes for tensor in self.tensors)

    def _outputs(self) -> Iterator[OutputTensor]:
        aliases = [tie.alias for tie in self._schema.ties if tie.in_source]
        tensors = (tensor.name for unit in self._schema.units for tensor in unit.tensors)
        for name in (*tensors, *aliases):
            unit, tensor = self._schema.find(name)
            yield OutputTensor(name=name, dtype=self._target(unit, tensor), shape=tensor.shape)

    def _target(self, unit: Unit, tensor: Tensor) -> str:
        if not unit.trainable:
            return tensor.dtype
        return self._dtype or ("BF16" if tensor.dtype in FP8 else tensor.dtype)

    def content(self, output: OutputTensor) -> Iterator[memoryview]:
        """Yield the bytes of one tensor."""
        unit, tensor = self._schema.find(output.name)
        role = self._role(unit, output.dtype)
        record = self._schema.record(unit, role)
        offset, nbytes = tensor.offset * record.itemsize, tensor.length * record.itemsize
        for piece in self._checked.read(record, offset, nbytes):
            data = _encoded(piece, output.dtype) if role is Role.MASTER else piece
            self._report(data.nbytes)
            yield data

    def _role(self, unit: Unit, dtype: str) -> Role:
        """Return the role that holds the bits to write: rounded weights, or the master."""
        roles = self._schema.roles(unit)
        rounded = dtype == "BF16" and Role.WEIGHTS in roles
        return Role.WEIGHTS if rounded or not unit.trainable else Role.MASTER

    def _report(self, nbytes: int) -> None:
        self._done += nbytes
        if self._on_progress:
            self._on_progress(self._done, self._nbytes)


def _encoded(master: memoryview, dtype: str) -> memoryview:
    values = np.frombuffer(master, "<f4")
    if dtype == "F32":
        return master
    out = np.empty(2 * len(values), np.uint8)
    encode(values, dtype, out)
    return out.data


def _side_files(reader: StoreReader, schema: Schema, dtype: str) -> dict[str, bytes]:
    files = {name: reader.schema_file(name) for name in schema.files}
    if DTYPES[dtype]:
        files[CONFIG] = _with_dtype(files[CONFIG], dtype)
    return files


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """Return config.json saying ``dtype`` wherever it names the data type of the weights."""
    document = parse_object(config, Path(CONFIG))
    for key in ("dtype", "torch_dtype"):
        if key in document:
            document[key] = dtype
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
