"""From a run file, or the remains of a run, to a trained store."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from checkpoint.checked import read_schema
from checkpoint.schema import Schema
from megatrain import engine as engines
from megatrain import limits, stores
from megatrain.config import Change, RunConfig, changes, with_sets
from megatrain.data.batches import Batches
from megatrain.data.dataset import Dataset
from megatrain.data.order import Order
from megatrain.inputs import Inputs, open_inputs
from megatrain.metrics import MetricsLog
from megatrain.planner import Plan
from megatrain.stores import METRICS_FILE, RUN_FILE, is_store
from megatrain.teardown import Teardown
from megatrain.train_state import TrainState
from megatrain.trainer import Observer, Stop, Trainer
from tiering.backends import choice
from tiering.errors import CorruptionError, RefusedError
from tiering.store import StoreWriter, open_newest_whole, open_writer

__all__ = ["METRICS_FILE", "RUN_FILE", "Outcome", "RunObserver", "is_store", "resume", "train"]

log = logging.getLogger(__name__)

_FIXED = {
    "out": "to have it elsewhere, move the folder and resume it there",
    "model": "to begin another run from this one's weights, export them",
    "store.drives": "the drives of a store are chosen when it is made",
    "store.tier": "to store its shards in another way: megatrain-ckpt shard --tier",
    "store.codec": "to store its shards in another way: megatrain-ckpt shard --codec",
}


class RunObserver(Observer, stores.ConversionObserver, Protocol):
    """Whoever watches a run from before its first allocation to its end."""

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
    stores.require_usable_out(config.out)
    choice.require(config.store.io)
    run_id = uuid.uuid4().hex
    with Teardown() as stack:
        if not is_store(stores.store_path(config)):
            _require_no_metrics(config)
        inputs = stores.convert_model(config, observer, stop)
        if inputs:
            stack.enter_context(inputs.dataset)
        store = stack.enter_context(open_writer(stores.store_path(config), run_id=run_id))
        store.use_engine(config.store.io)
        schema = read_schema(store)
        _require_no_unfinished(store, schema)
        stores.require_same_drives(config, store)
        stores.require_same_tier(config, store)
        _require_fresh_out(config, store)
        if inputs is None:
            inputs = _inputs(store, schema, config, stack)
        state = TrainState(
            run_id=run_id, config=config, data="", counts=dict.fromkeys(_names(schema), 0)
        )
        return _run(store, schema, inputs, state, observer, stop)


def resume(
    place: Path,
    sets: Sequence[str],
    observer: RunObserver,
    stop: Stop,
    *,
    allow_changes: bool = False,
    generation: int | None = None,
) -> Outcome:
    """Go on with the run of a store, or of a run's folder, from its newest or a given generation.

    Without ``generation``, those that turn out to be damaged before the run has committed anything
    are skipped, each with a line that says why. The one that is taken becomes the newest.

    Raises:
        RefusedError: There is no run or no such generation to go on with, or a setting that
            decides numbers was changed without ``allow_changes``.
        CorruptionError: The given generation is damaged, or every one is.
    """
    found, skipped = stores.find(place), set[int]()
    while True:
        with Teardown() as stack:
            store = stack.enter_context(_opened(found.store, place, generation, skipped))
            slot = store.manifest.slot
            try:
                return _go_on(found, store, sets, observer, stop, allow_changes, stack)
            except CorruptionError as error:
                # a commit goes to another slot: in this one is still what was opened
                numbers = {generation.number for generation in store.generations}
                others = numbers - skipped - {store.manifest.generation}
                if generation is not None or store.manifest.slot != slot or not others:
                    raise
                log.warning("generation %d is skipped: %s", store.manifest.generation, error)
                skipped.add(store.manifest.generation)


def _opened(path: Path, place: Path, generation: int | None, skip: Collection[int]) -> StoreWriter:
    run_id = f"resume of {place}"
    if generation is None:
        return open_newest_whole(path, skip=skip, run_id=run_id)
    return open_writer(path, generation=generation, run_id=run_id)


def _go_on(
    found: stores.Place,
    store: StoreWriter,
    sets: Sequence[str],
    observer: RunObserver,
    stop: Stop,
    allow_changes: bool,
    stack: ExitStack,
) -> Outcome:
    schema = read_schema(store)
    state = _committed(store, schema)
    store.say_run(state.run_id)
    before = found.apply(state.config)
    config = with_sets(before, sets)
    store.use_engine(config.store.io)
    stores.require_usable_out(config.out)
    by_name = changes(before, config)
    _require_fixed(by_name)
    _require_same_run([c for c in by_name if c.key != "data.train"], allow=allow_changes)
    inputs = _inputs(store, schema, config, stack)
    known = changes(before, config)
    if before.data.train != config.data.train:  # then its content decides
        fingerprint = inputs.dataset.fingerprint
        known = changes(before, config, old_data=state.data, new_data=fingerprint)
    _require_same_run(known, allow=allow_changes)
    _tell(known, before, config, state.step + 1)
    state = _with_data(replace(state, config=config), inputs.dataset, allow=allow_changes)
    return _run(store, schema, inputs, state, observer, stop)


def _inputs(store: StoreWriter, schema: Schema, config: RunConfig, stack: ExitStack) -> Inputs:
    files = {name: store.schema_file(name) for name in schema.files}
    inputs = open_inputs(schema, store.records, files, config)
    stack.enter_context(inputs.dataset)
    return inputs


# -- what may not be ---------------------------------------------------------------------------


def _committed(store: StoreWriter, schema: Schema) -> TrainState:
    found = store.manifest.train_state
    if not found:
        raise RefusedError(
            f"{store.path}: no run to go on with: no step was committed; start one with "
            "megatrain train"
        )
    return TrainState.decode(found, _names(schema))


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
    begun = not store.manifest.train_state and stores.was_begun(config.out, store.path)
    if begun and metrics.exists():  # its rows are past the store's step, and go as on every resume
        log.warning("%s: dropping the rows of a run that ended before its first commit", metrics)
    else:
        _require_no_metrics(config)


def _require_no_metrics(config: RunConfig) -> None:
    if (config.out / METRICS_FILE).exists():
        raise RefusedError(
            f"out: {config.out} has the {METRICS_FILE} of an earlier run; choose another folder"
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


def _require_fixed(found: Iterable[Change]) -> None:
    for change in found:
        if hint := _FIXED.get(change.key):
            raise RefusedError(f"{change}: a resumed run keeps its {change.key}; {hint}")


def _require_same_run(found: Iterable[Change], *, allow: bool) -> None:
    harmful = [change for change in found if not change.harmless]
    if harmful and not allow:
        listed = "\n".join(f"  {change}" for change in harmful)
        raise RefusedError(
            f"these changes would make it another run:\n{listed}\n"
            "pass --allow-changes to apply them from the next step on"
        )


def _tell(found: Iterable[Change], before: RunConfig, after: RunConfig, step: int) -> None:
    """Say what is changed from the update ``step`` on, and what that does to the numbers."""
    for change in found:
        log.warning("changed from step %d on: %s", step, change)
    old, new = before.train, after.train
    if step > 1 and old.rate(step - 1) != new.rate(step - 1):
        log.warning(
            "the learning rate was %.6g in step %d and is %.6g in step %d",
            old.rate(step - 2),
            step - 1,
            new.rate(step - 1),
            step,
        )
    if old.micro_batch != new.micro_batch and old.samples_per_step == new.samples_per_step:
        log.warning(
            "the samples of a step stay the same, but in bfloat16 (and with dropout) their sums "
            "are rounded in another order: from step %d on the numbers differ in their last bits "
            "from those of an uninterrupted run",
            step,
        )


# -- the run itself ----------------------------------------------------------------------------


def _run(
    store: StoreWriter,
    schema: Schema,
    inputs: Inputs,
    state: TrainState,
    observer: RunObserver,
    stop: Stop,
) -> Outcome:
    config, dataset = state.config, inputs.dataset
    state = replace(state, data=dataset.fingerprint)
    slots = config.store.slots
    planning = engines.planning(schema, store.records, engines.pick_device(config.train.device))
    plan = limits.recounted(inputs.plan, store, config, planning)
    observer.on_plan(plan, state, slots)
    store.make_newest()
    if not state.finished:
        store.fit_slots(slots)
        if config.store.reserve:
            store.reserve()
        stores.write_run_file(config)
        state = _steps(store, schema, plan, state, dataset, observer, stop)
    else:
        _drop_later_rows(MetricsLog(config.out / METRICS_FILE), state.step)
    return Outcome(store=store.path, out=config.out, step=state.step, finished=state.finished)


def _drop_later_rows(metrics: MetricsLog, step: int) -> None:
    """Drop rows past the end of a run: it was longer before it was gone back."""
    if any(row["step"] > step for row in metrics.read()):
        metrics.truncate_after(step)


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
        leave=stop.leave,
    ) as engine:
        trainer.run(engine)
        trainer.detach()
        del engine
    return trainer.state


def _names(schema: Schema) -> tuple[str, ...]:
    return tuple(tensor.name for unit in engines.trained_units(schema) for tensor in unit.tensors)
