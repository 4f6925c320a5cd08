"""The slots of a store as a state machine: a writer, readers, kills and power cuts, every order.

What a slot holds is the step whose records it has, or None while it is being written and after
that went wrong. A commit is cut where the protocol has its steps; what happens inside of them is
the matter of the enumeration of power cuts.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Listed(NamedTuple):
    """A generation as the root names it."""

    number: int
    slot: int
    step: int


class Reader(NamedTuple):
    """How far somebody is with reading a generation."""

    stage: Literal["found", "opened", "locked", "reading"]
    of: Listed

    @property
    def holds(self) -> bool:
        return self.stage in ("locked", "reading")


class State(NamedTuple):
    """Everything that matters.

    ``durable`` is the root on the drive, ``visible`` the one that a process sees. ``removed`` are
    manifests without a name that a power cut may bring back. ``promised`` is the newest generation
    that a commit or an open has returned with.
    """

    slots: tuple[int | None, ...]
    unsynced: frozenset[int]
    durable: tuple[Listed, ...]
    visible: tuple[Listed, ...]
    manifests: frozenset[Listed]
    removed: frozenset[Listed]
    promised: int
    phase: Literal["dead", "idle", "writing", "synced", "renamed"]
    step: int
    working: int | None
    output: int | None
    readers: tuple[Reader, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules that make it right; each can be left out to see what it is for.

    That the slots of the durable root are kept needs no rule of its own: whenever a slot is
    chosen the durable root is the visible one.
    """

    slots_of_readers_are_kept: bool = True
    readers_look_again: bool = True
    bytes_before_names: bool = True
    names_before_freeing: bool = True
    opening_syncs: bool = True
    a_failed_step_stops: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """So many slots and retained generations, up to a number of steps, commits and readers.

    With a ``spare`` slot a step never overwrites the one before it. Free slots are alike, so the
    first is taken, unless ``any_slot`` is.
    """

    slots: int
    retain: int
    spare: int = 0
    readers: int = 1
    steps: int = 3
    commits: int = 4
    any_slot: bool = False
    rules: Rules = field(default_factory=Rules)

    def start(self) -> State:
        """Return a store with one generation, opened for writing."""
        first = Listed(1, 0, 0)
        return State(
            slots=(0, *itertools.repeat(None, self.slots - 1)),
            unsynced=frozenset(),
            durable=(first,),
            visible=(first,),
            manifests=frozenset({first}),
            removed=frozenset(),
            promised=1,
            phase="idle",
            step=0,
            working=None,
            output=None,
            readers=(),
        )

    # -- what is always true ---------------------------------------------------------------------

    def wrong(self, state: State) -> str | None:
        """Return what must never be, if it is."""
        for listed in state.visible:
            if state.slots[listed.slot] != listed.step:
                return f"{listed} is listed, its slot holds {state.slots[listed.slot]}"
            if listed not in state.manifests:
                return f"{listed} is listed, its manifest is gone"
        for reader in state.readers:
            if reader.stage == "reading" and state.slots[reader.of.slot] != reader.of.step:
                return f"{reader.of} is being read, its slot holds {state.slots[reader.of.slot]}"
        if state.visible[-1].number < state.promised:
            return f"generation {state.promised} was promised, there is {state.visible[-1]}"
        if state.phase == "idle" and state.durable != state.visible:
            return "a slot may be chosen, and the root is not durable"
        if state.phase == "idle" and not state.readers and not self.outputs(self.reaped(state)):
            return "nobody reads, and there is no slot to write to"
        return None

    # -- the writer ------------------------------------------------------------------------------

    def free(self, state: State) -> list[int]:
        """Return the slots that hold no truth."""
        kept = {listed.slot for listed in state.visible}
        if self.rules.slots_of_readers_are_kept:
            kept |= {listed.slot for listed in state.manifests - set(state.visible)}
        return [slot for slot in range(self.slots) if slot not in kept]

    def outputs(self, state: State) -> list[int]:
        """Return the slots that the next step may write."""
        if self.spare or state.working is None:
            return [slot for slot in self.free(state) if slot != state.working]
        return [state.working]

    def reaped(self, state: State) -> State:
        """Remove the manifests of dropped generations that nobody holds."""
        held = {reader.of for reader in state.readers if reader.holds}
        gone = {m for m in state.manifests if m not in state.visible and m not in held}
        return state._replace(manifests=state.manifests - gone, removed=state.removed | gone)

    def _writer(self, state: State) -> Iterator[tuple[str, State]]:
        if state.phase == "dead":
            yield "open", self._opened(state)
            return
        yield "kill", state._replace(phase="dead", working=None, output=None)
        match state.phase:
            case "idle":
                yield from self._idle(state)
            case "writing":
                yield from self._writing(state)
            case "synced":
                if state.visible[-1].number < self.commits:
                    yield "rename", self._renamed(state, state.working, state.step)
            case "renamed":
                yield "committed", self._committed(state)

    def _opened(self, state: State) -> State:
        latest = state.visible[-1]
        durable = state.visible if self.rules.opening_syncs else state.durable
        return self.reaped(
            state._replace(phase="idle", durable=durable, promised=latest.number, step=latest.step)
        )

    def _idle(self, state: State) -> Iterator[tuple[str, State]]:
        if state.step < self.steps:
            now = self.reaped(state)
            for slot in self.outputs(now)[: None if self.any_slot else 1]:
                yield (
                    f"write slot {slot}",
                    now._replace(
                        phase="writing",
                        output=slot,
                        slots=_with(now.slots, slot, None),
                        unsynced=now.unsynced | {slot},
                    ),
                )
        if state.working is not None:
            left = frozenset() if self.rules.bytes_before_names else state.unsynced
            yield "sync", state._replace(phase="synced", unsynced=left)
        elif state.visible[-1].number < self.commits:
            for listed in state.visible[:-1]:
                others = tuple(other for other in state.visible if other != listed)
                again = self._renamed(state._replace(visible=others), listed.slot, listed.step)
                yield f"roll back to {listed.number}", again
            for count in range(1, len(state.visible)):
                visible = state.visible[-count:]
                yield f"prune to {count}", state._replace(phase="renamed", visible=visible)

    def _writing(self, state: State) -> Iterator[tuple[str, State]]:
        assert state.output is not None
        done = state._replace(phase="idle", output=None)
        slots = _with(state.slots, state.output, state.step + 1)
        yield "step done", done._replace(slots=slots, step=state.step + 1, working=state.output)
        if state.output != state.working:
            yield "step undone", done
        elif self.rules.a_failed_step_stops:
            yield "step failed", state._replace(phase="dead", working=None, output=None)
        else:
            yield "step failed", done

    def _renamed(self, state: State, slot: int | None, step: int) -> State:
        assert slot is not None
        new = Listed(state.visible[-1].number + 1, slot, step)
        renamed = state._replace(
            phase="renamed",
            step=step,
            visible=(*state.visible, new)[-self.retain :],
            manifests=state.manifests | {new},
        )
        return renamed if self.rules.names_before_freeing else self.reaped(renamed)

    def _committed(self, state: State) -> State:
        durable = state.visible if self.rules.names_before_freeing else state.durable
        latest = state.visible[-1].number
        return self.reaped(
            state._replace(phase="idle", durable=durable, promised=latest, working=None)
        )

    # -- everybody else --------------------------------------------------------------------------

    def _readers(self, state: State) -> Iterator[tuple[str, State]]:
        if len(state.readers) < self.readers:
            for listed in state.visible:
                yield f"look up {listed}", _read(state, -1, Reader("found", listed))
        for place, (stage, of) in enumerate(state.readers):
            yield f"stop reading {of}", _read(state, place, None)
            match stage:
                case "found":
                    if of in state.manifests:
                        yield f"open {of}", _read(state, place, Reader("opened", of))
                case "opened":
                    yield f"lock {of}", _read(state, place, Reader("locked", of))
                case "locked":
                    if of in state.visible or not self.rules.readers_look_again:
                        yield f"read {of}", _read(state, place, Reader("reading", of))

    def _cuts(self, state: State) -> Iterator[tuple[str, State]]:
        for root, back, lost in itertools.product(
            {state.durable, state.visible},
            {frozenset(), state.removed},
            _subsets(state.unsynced),
        ):
            yield (
                f"power cut, root {root[-1].number}, lost slots {sorted(lost)}",
                state._replace(
                    slots=tuple(None if k in lost else s for k, s in enumerate(state.slots)),
                    unsynced=frozenset(),
                    durable=root,
                    visible=root,
                    manifests=state.manifests | back,
                    removed=frozenset(),
                    phase="dead",
                    working=None,
                    output=None,
                    readers=(),
                ),
            )

    def next(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield everything that may happen, with what is then."""
        yield from self._writer(state)
        yield from self._readers(state)
        yield from self._cuts(state)


def _with(slots: tuple[int | None, ...], slot: int, content: int | None) -> tuple[int | None, ...]:
    return (*slots[:slot], content, *slots[slot + 1 :])


def _read(state: State, place: int, reader: Reader | None) -> State:
    others = [other for k, other in enumerate(state.readers) if k != place]
    return state._replace(readers=tuple(sorted([*others, *([reader] if reader else [])])))


def _subsets(items: frozenset[int]) -> Iterator[frozenset[int]]:
    for count in range(len(items) + 1):
        yield from map(frozenset, itertools.combinations(sorted(items), count))


class Broken(AssertionError):
    """A state that must never be, and how it came about."""


def explore(model: Model) -> int:
    """Visit every state that can be reached, breadth first, and return how many there are.

    Raises:
        Broken: One of them is wrong; the shortest way to it.
    """
    start = model.start()
    came: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        if (wrong := model.wrong(state)) is not None:
            raise Broken(f"{wrong}: {' > '.join(_way(came, state))}")
        for event, then in model.next(state):
            then = _without_noise(then)
            if then not in came:
                came[then] = (state, event)
                waiting.append(then)
    return len(came)


def _without_noise(state: State) -> State:
    """Forget what a slot holds that nothing names any more: it is written before it is named."""
    roots = {*state.durable, *state.visible}
    named = {listed.slot for listed in (*roots, *state.manifests)}
    named |= {reader.of.slot for reader in state.readers}
    named |= {slot for slot in (state.working, state.output) if slot is not None}
    return state._replace(
        slots=tuple(s if k in named else None for k, s in enumerate(state.slots)),
        unsynced=state.unsynced & named,
        removed=state.removed & roots,
    )


def _way(came: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    events = []
    while (step := came[state]) is not None:
        state, event = step
        events.append(event)
    return events[::-1]
