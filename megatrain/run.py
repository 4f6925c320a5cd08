"""From a run file, or the remains of a run, to a trained store."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from checkpoint.checked import read_schema
from checkpoint.plan import Plan as ConversionPlan
from checkpoint.schema import Layout, Schema
from megatrain import engine as engines
from megatrain.config import RunConfig, changes, with_sets
from megatrain.data.batches import Batches
from megatrain.data.dataset import Dataset, open_dataset, tokenizer_from_files
from megatrain.data.order import Order
from megatrain.metrics import MetricsLog
from megatrain.planner import Plan
from megatrain.train_state import TrainState
from megatrain.trainer import Observer, Stop, Trainer
from tiering import fsops
from tiering.errors import RefusedError
from tiering.store import StoreWriter, open_writer

log = logging.getLogger(__name__)
RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
STORE_ROOT = "zarr.json"


class RunObserver(Observer, Protocol):
    """Whoever watches a run from before its first allocation to its end."""

    def on_conversion(self, plan: ConversionPlan) -> None:
        """Hear what a conversion will do, before it writes anything."""

    def on_converted(self, done: int, total: int) -> None:
        """Take its progress in bytes."""

    def on_plan(self, plan: Plan, state: TrainState, slots: int) -> None:
        """See the plan before anything is allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    store: Path
    out: Path
    step: int
    finished: bool


def train(config: RunConfig, observer: RunObserver, stop: Stop) -> Outcome:
    """Start a run and make its steps; the store holds every committed one.

    Raises:
        RefusedError: The store has an unfinished run, the data cannot be used, or the plan does
            not fit.
    """
    store_path = prepare_store(config, observer)
    run_id = uuid.uuid4().hex
    with open_writer(store_path, run_id=run_id) as store:
        schema = read_schema(store)
        _require_no_unfinished(store, schema)
        _require_fresh_out(config, store)
        state = TrainState(
            run_id=run_id, config=config, data="", counts=dict.fromkeys(_names(schema), 0)
        )
        return _run(store, schema, state, observer, stop)


def resume(
    place: Path,
    sets: Sequence[str],
    observer: RunObserver,
    stop: Stop,
    *,
    allow_changes: bool = False,
) -> Outcome:
    """Go on with the run of a store, or of a run's folder, from its last commit.

    Raises:
        RefusedError: There is no run to go on with, it is finished, or a setting that decides
            numbers was changed without ``allow_changes``.
    """
    store_path = store_of(place)
    with open_writer(store_path, run_id=f"resume of {place}") as store:
        schema = read_schema(store)
        found = store.manifest.train_state
        if not found:
            raise RefusedError(
                f"{store_path}: no run to go on with: no step was committed; start one with "
                "megatrain train"
            )
        state = TrainState.decode(found, _names(schema))
        config = with_sets(state.config, sets)
        state = _changed(state, config, allow=allow_changes)
        return _run(store, schema, state, observer, stop, other_data=allow_changes)


# -- stores ------------------------------------------------------------------------------------


def is_store(path: Path) -> bool:
    """Return whether ``path`` has the root of a store."""
    return (path / STORE_ROOT).is_file()


def store_of(place: Path) -> Path:
    """Return the store at ``place``, or that of the run whose folder ``place`` is."""
    if is_store(place):
        return place
    run_file = place / RUN_FILE
    if not run_file.is_file():
        raise RefusedError(
            f"{place}: neither a store (no {STORE_ROOT}) nor a run's folder (no {RUN_FILE})"
        )
    return store_path(RunConfig.from_json(run_file.read_bytes()))


def store_path(config: RunConfig) -> Path:
    """Return where the run's store is: the model itself, or a folder of the run."""
    return config.model if is_store(config.model) else config.out / "store"


def prepare_store(config: RunConfig, observer: RunObserver) -> Path:
    """Return the run's store, converted from the model's folder if it is not there yet.

    Plan and data are tried before the first byte is converted: a run that would be refused
    later is refused now.
    """
    target = store_path(config)
    if target == config.model:
        return target
    if not config.model.is_dir():
        raise RefusedError(f"model: {config.model} is neither a store nor a folder")
    if is_store(target):
        _require_same_model(config, target)
        return target
    from checkpoint.convert import convert
    from checkpoint.plan import plan_conversion

    layout = Layout.FLOAT32 if config.train.dtype == "float32" else Layout(config.store.layout)
    conversion = plan_conversion(config.model, layout=layout)
    engines.make_plan(conversion.schema, config, engines.pick_device(config.train.device))
    _dataset(conversion.schema, conversion.side_files, config).close()
    write_run_file(config)
    convert(
        config.model,
        target,
        drives=config.store.drives,
        layout=layout,
        ram=config.memory.ram,
        on_plan=observer.on_conversion,
        on_progress=observer.on_converted,
    )
    return target


def _require_same_model(config: RunConfig, target: Path) -> None:
    run_file = config.out / RUN_FILE
    if run_file.is_file():
        earlier = RunConfig.from_json(run_file.read_bytes())
        if earlier.model == config.model:
            log.warning("using %s, which was converted from %s before", target, config.model)
            return
    raise RefusedError(
        f"{target} is there already and was not made from {config.model}; choose another out, "
        f"or train that store with model: {target}"
    )


def _require_no_unfinished(store: StoreWriter, schema: Schema) -> None:
    found = store.manifest.train_state
    if not found:
        return
    state = TrainState.decode(found, _names(schema))
    if not state.finished:
        raise RefusedError(
            f"{store.path} has an unfinished run, at step {state.step} of "
            f"{state.config.train.steps}: go on with it (megatrain-ckpt resume {store.path}), or "
            "begin a new one from its weights (megatrain-ckpt export, then train the exported "
            "folder)"
        )


def _require_fresh_out(config: RunConfig, store: StoreWriter) -> None:
    metrics = config.out / METRICS_FILE
    if not metrics.exists():
        return
    if not store.manifest.train_state and _was_begun(config):
        log.warning("%s: dropping the rows of a run that ended before its first commit", metrics)
        return  # its rows are past the store's step, and go as on every resume
    raise RefusedError(
        f"out: {config.out} has the {METRICS_FILE} of an earlier run; choose another folder"
    )


def _was_begun(config: RunConfig) -> bool:
    """Return whether a run on the same store was begun in the run's folder."""
    run_file = config.out / RUN_FILE
    if not run_file.is_file():
        return False
    return store_path(RunConfig.from_json(run_file.read_bytes())) == store_path(config)


def write_run_file(config: RunConfig) -> None:
    """Leave the configuration in the run's folder; it leads resume to the store."""
    config.out.mkdir(parents=True, exist_ok=True)
    fresh = config.out / f"{RUN_FILE}.new"
    fsops.unlink(fresh, missing_ok=True)
    fsops.write_file(fresh, config.to_json().encode())
    fsops.replace(fresh, config.out / RUN_FILE)
    fsops.fsync_dir(config.out)


# -- the run itself ----------------------------------------------------------------------------


def _run(
    store: StoreWriter,
    schema: Schema,
    state: TrainState,
    observer: RunObserver,
    stop: Stop,
    *,
    other_data: bool = False,
) -> Outcome:
    config = state.config
    device = engines.pick_device(config.train.device)
    plan = engines.make_plan(schema, config, device)
    with ExitStack() as stack:
        files = {name: store.schema_file(name) for name in schema.files}
        dataset = stack.enter_context(_dataset(schema, files, config))
        state = _with_data(state, dataset, allow=other_data)
        slots = config.store.retain + 1
        observer.on_plan(plan, state, slots)
        if not state.finished:
            write_run_file(config)
            store.ensure_slots(slots)
            if config.store.reserve:
                store.reserve()
            state = _steps(store, schema, plan, state, dataset, observer, stop)
    return Outcome(store=store.path, out=config.out, step=state.step, finished=state.finished)


def _steps(
    store: StoreWriter,
    schema: Schema,
    plan: Plan,
    state: TrainState,
    dataset: Dataset,
    observer: RunObserver,
    stop: Stop,
) -> TrainState:
    config = state.config
    metrics = MetricsLog(config.out / METRICS_FILE)
    metrics.truncate_after(state.step)
    order = Order(
        size=len(dataset),
        fingerprint=dataset.fingerprint,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
    )
    train = config.train
    batches = Batches(dataset, order, micro_batch=train.micro_batch, accumulate=train.accumulate)
    trainer = Trainer(state, batches, metrics, observer=observer, stop=stop)
    with engines.start(
        store,
        schema,
        plan,
        config,
        device=engines.pick_device(train.device),
        counts=dict(state.counts),
        commit=trainer.commit,
    ) as engine:
        trainer.run(engine)
        trainer.detach()
        del engine
    return trainer.state


def _dataset(schema: Schema, files: Mapping[str, bytes], config: RunConfig) -> Dataset:
    words = engines.trained_units(schema)[0].tensors[0].shape[0]
    return open_dataset(
        config.data.train,
        max_seq_len=config.data.max_seq_len,
        tokenizer=lambda: tokenizer_from_files(files),
        vocab_size=words,
        skip_bad_lines=config.data.skip_bad_lines,
    )


def _with_data(state: TrainState, dataset: Dataset, *, allow: bool) -> TrainState:
    if state.data and state.data != dataset.fingerprint:
        changed = (
            f"data.train: {state.config.data.train} has changed since the run began: sha256 "
            f"{dataset.fingerprint[:12]}, was {state.data[:12]}"
        )
        if not allow:
            raise RefusedError(
                f"{changed}; restore the file, or resume with --allow-changes to go on with this "
                "one"
            )
        log.warning("%s; going on with this one", changed)
    return replace(state, data=dataset.fingerprint)


def _changed(state: TrainState, config: RunConfig, *, allow: bool) -> TrainState:
    found = changes(state.config, config)
    harmful = [change for change in found if not change.harmless]
    if harmful and not allow:
        listed = "\n".join(f"  {change}" for change in harmful)
        raise RefusedError(
            f"these changes would make it another run:\n{listed}\n"
            "pass --allow-changes to apply them from the next step on"
        )
    for change in found:
        log.warning("changed from step %d on: %s", state.step + 1, change)
    return replace(state, config=config)


def _names(schema: Schema) -> tuple[str, ...]:
    return tuple(tensor.name for unit in engines.trained_units(schema) for tensor in unit.tensors)
