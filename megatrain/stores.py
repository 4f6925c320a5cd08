"""The store of a run: found, made from a model's folder, or refused."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from checkpoint.plan import Plan as ConversionPlan
from checkpoint.schema import Layout
from megatrain.config import RunConfig
from megatrain.inputs import Inputs, open_inputs
from megatrain.trainer import Stop
from tiering import fsops
from tiering.drives import require_folder
from tiering.errors import MegatrainError, RefusedError, StorageError
from tiering.generations import read_root
from tiering.store import StoreWriter

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
CONVERTED_FILE = "converted.json"
STORE_ROOT = "zarr.json"
STORE_FOLDER = "store"
_UNKNOWN = ""  # the uuid of a store that is being made


class ConversionObserver(Protocol):
    """Whoever watches a conversion."""

    def on_conversion(self, plan: ConversionPlan) -> None:
        """Hear what a conversion will do, before it writes anything."""

    def on_converted(self, done: int, total: int) -> None:
        """Take its progress in bytes."""


def is_store(path: Path) -> bool:
    """Return whether ``path`` has the root of a store."""
    return (path / STORE_ROOT).is_file()


def store_path(config: RunConfig) -> Path:
    """Return where the run's store is: the model itself, or a folder of the run."""
    return config.model if is_store(config.model) else config.out / STORE_FOLDER


# -- finding -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run is now; ``out`` is None if only its store is known.

    ``named`` says that ``out`` is what was asked for, and not just the folder around the store.
    """

    store: Path
    out: Path | None
    named: bool = False

    def apply(self, config: RunConfig) -> RunConfig:
        """Return ``config`` as of a run that is here, wherever it was when it was written.

        Raises:
            RefusedError: The named folder is that of an earlier run on the store.
        """
        out = self.out or config.out
        if self._is_earlier(out, config):
            if self.named:
                raise RefusedError(
                    f"{out}: its store, {self.store}, has the run of {config.out} now; resume "
                    f"that: megatrain-ckpt resume {config.out}"
                )
            out = config.out
        trained_in_place = config.model == config.out / STORE_FOLDER
        if out != config.out:
            log.warning("the run's folder is %s now; it was %s", out, config.out)
        elif not out.is_dir():
            log.warning("the run's folder %s is gone: its metrics begin anew there", out)
        moved = config.model_copy(update={"out": out})
        if trained_in_place or not _same(store_path(moved), self.store):
            moved = moved.model_copy(update={"model": self.store})
        return moved

    def _is_earlier(self, out: Path, config: RunConfig) -> bool:
        """Say whether the folder ``out`` has the rows of a run before that of ``config``.

        A moved or copied folder says that it is where ``config`` has it.
        """
        if _same(out, config.out) or not was_begun(config.out, self.store):
            return False
        try:
            return read_run_file(out).out != config.out
        except RefusedError:  # torn: then the place decides
            return False


def find(place: Path) -> Place:
    """Return the run whose folder, or whose store, ``place`` is.

    The folder that was opened counts, not where it was when the run began.

    Raises:
        RefusedError: There is no run.
    """
    place = Path(os.path.abspath(place))
    if is_store(place):
        parent = place.parent
        return Place(store=place, out=parent if _is_folder_of(parent, place) else None)
    if not (place / RUN_FILE).is_file():
        if (place / "config.json").is_file():
            raise RefusedError(
                f"{place}: a model's folder has weights, but no masters, moments or step: what "
                f"begins with it is a new run (megatrain train with model: {place})"
            )
        raise RefusedError(
            f"{place}: neither a store (no {STORE_ROOT}) nor a run's folder (no {RUN_FILE})"
        )
    return Place(store=_store_of(place), out=place, named=True)


def _store_of(folder: Path) -> Path:
    """Return the store of a run's folder; one inside it moves, and is copied, with it."""
    config = read_run_file(folder)
    recorded, inside = store_path(config), folder / STORE_FOLDER
    candidates = [recorded, inside]
    if recorded == config.out / STORE_FOLDER:
        candidates.reverse()
    for candidate in candidates:
        if is_store(candidate):
            return candidate
    where = config.model if recorded == config.out / STORE_FOLDER else recorded
    raise RefusedError(
        f"{folder}: its store is gone: neither {inside} nor {where} is one; if it was moved, "
        "resume the store itself"
    )


def _is_folder_of(folder: Path, store: Path) -> bool:
    if not (folder / RUN_FILE).is_file():
        return False
    try:
        return _same(_store_of(folder), store)
    except RefusedError:  # torn: then the place decides
        return store.name == STORE_FOLDER


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def read_run_file(folder: Path) -> RunConfig:
    """Return the configuration in a run's folder.

    Raises:
        RefusedError: It is torn, or not one.
    """
    path = folder / RUN_FILE
    try:
        return RunConfig.from_json(path.read_bytes())
    except OSError as error:
        raise StorageError("read", path, errno=error.errno or 0) from error
    except (ValueError, MegatrainError) as error:
        raise RefusedError(
            f"{path}: not the settings of a run: {error}; resume the store itself, usually "
            f"{folder / STORE_FOLDER}"
        ) from error


def write_run_file(config: RunConfig) -> None:
    """Leave the configuration in the run's folder; it leads resume to the store.

    Call it with the store's lock held: two runs that want one folder must not both write.
    """
    _write(config.out, RUN_FILE, config.to_json())


def _write(folder: Path, name: str, text: str) -> None:
    fsops.make_dirs(folder)
    fsops.replace_file(folder / name, text.encode(), fresh=folder / f"{name}.new")


# -- making ------------------------------------------------------------------------------------


def convert_model(config: RunConfig, observer: ConversionObserver, stop: Stop) -> Inputs | None:
    """Make the run's store of the model's folder; return the inputs, or None if it is there.

    Plan and data are tried before the first byte is converted: a run that would be refused
    later is refused now. A refused or interrupted conversion leaves nothing.

    Raises:
        KeyboardInterrupt: ``stop`` was requested meanwhile.
    """
    target = store_path(config)
    if target == config.model:
        return None
    if not config.model.is_dir():
        raise RefusedError(f"model: {config.model} is neither a store nor a folder")
    if is_store(target):
        _require_same_model(config, target)
        return None
    for folder in config.store.drives:
        require_folder(folder)
    from checkpoint.plan import plan_conversion

    layout = Layout.FLOAT32 if config.train.dtype == "float32" else Layout(config.store.layout)
    conversion = plan_conversion(config.model, layout=layout)
    codec = config.store.codec_in_use
    records = {r.name: replace(r, codec=codec) for r in conversion.schema.records()}
    inputs = open_inputs(conversion.schema, records, conversion.side_files, config)
    try:
        _convert(config, target, layout, observer, stop)
    except BaseException:
        inputs.dataset.close()
        raise
    return inputs


def _convert(
    config: RunConfig, target: Path, layout: Layout, observer: ConversionObserver, stop: Stop
) -> None:
    from checkpoint.convert import convert

    def on_progress(done: int, total: int) -> None:
        observer.on_converted(done, total)
        if stop.requested:
            raise KeyboardInterrupt

    with _folder(config.out), _begun(config, target):
        convert(
            config.model,
            target,
            drives=config.store.drives,
            layout=layout,
            codec=config.store.codec_in_use,
            ram=config.memory.ram,
            on_plan=observer.on_conversion,
            on_progress=on_progress,
        )
    _write(config.out, CONVERTED_FILE, json.dumps(_origin(config, read_root(target).uuid)))


@contextmanager
def _begun(config: RunConfig, target: Path) -> Iterator[None]:
    """Say beforehand of which model the store will be; an exception until then takes it back.

    A kill may come between the store's first commit and what is said after it.
    """
    try:
        _write(config.out, CONVERTED_FILE, json.dumps(_origin(config, _UNKNOWN)))
        yield
    except BaseException:
        if not is_store(target):
            for name in (CONVERTED_FILE, f"{CONVERTED_FILE}.new"):
                fsops.unlink(config.out / name, missing_ok=True)
        raise


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Make a folder and its parents; an exception removes those that were made."""
    made = fsops.make_dirs(path)
    try:
        yield
    except BaseException:
        for folder in reversed(made):
            if any(folder.iterdir()):
                break
            fsops.remove_dir(folder)
        raise


def _origin(config: RunConfig, uuid: str) -> Mapping[str, str]:
    """Return what :data:`CONVERTED_FILE` says of a store: the one, and the folder it is from."""
    return {"model": str(config.model.resolve()), "store": uuid}


# -- refusing ----------------------------------------------------------------------------------


def require_usable_out(out: Path) -> None:
    """Refuse a run's folder that cannot be one, before anything is done for it."""
    nearest = next(folder for folder in (out, *out.parents) if folder.exists())
    if not nearest.is_dir():
        raise RefusedError(f"out: {out} cannot be a folder: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RefusedError(f"out: {out} cannot be written: no permission in {nearest}")


def _require_same_model(config: RunConfig, target: Path) -> None:
    """Refuse a store that is not known to be the finished conversion of the run's model."""
    path = config.out / CONVERTED_FILE
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        found = None
    except OSError as error:
        raise StorageError("read", path, errno=error.errno or 0) from error
    made = _origin(config, read_root(target).uuid)
    if found not in (made, _origin(config, _UNKNOWN)):
        raise RefusedError(
            f"{target} is there already and is not known to be made from {config.model}; choose "
            f"another out, or train that store with model: {target}"
        )
    log.warning("using %s, which was converted from %s before", target, config.model)
    if found != made:  # a kill came before this could be said
        _write(config.out, CONVERTED_FILE, json.dumps(made))


def require_same_drives(config: RunConfig, store: StoreWriter) -> None:
    """Refuse ``store.drives`` for a store that has others: they are chosen when it is made."""
    wanted = [folder.resolve() for folder in config.store.drives]
    found = [drive.folder.resolve().parent for drive in store.drives]
    if wanted and set(wanted) != set(found):
        raise RefusedError(
            f"store.drives: {store.path} is there already, on {_listed(found)}; leave "
            f"store.drives out, or move it to {_listed(wanted)} with: megatrain-ckpt shard "
            f"{store.path} --drive ..."
        )


def require_same_tier(config: RunConfig, store: StoreWriter) -> None:
    """Refuse a ``store.tier`` that a store does not have: its shards stay as they were made."""
    given = config.store.model_fields_set
    if "tier" not in given:
        return
    found = {record.codec for record in store.records.values()}
    plain = config.store.tier == "nvme"
    if plain:
        fits = found == {None}
    else:
        fits = None not in found and ("codec" not in given or found == {config.store.codec})
    if not fits:
        kinds = ", ".join(sorted(codec or "plain" for codec in found))
        raise RefusedError(
            f"store.tier: {store.path} is there already, with other shards ({kinds}); leave "
            f"store.tier out, or change them with: megatrain-ckpt shard {store.path} --tier "
            + ("nvme" if plain else f"zarr --codec {config.store.codec}")
        )


def _listed(folders: list[Path]) -> str:
    return ", ".join(map(str, folders))


def was_begun(out: Path, store: Path) -> bool:
    """Return whether a run on ``store`` was begun in the run's folder ``out``."""
    try:
        return (out / RUN_FILE).is_file() and _same(_store_of(out), store)
    except RefusedError:
        return False
