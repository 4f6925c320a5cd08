"""SIGKILL at moments of choice or of chance, going on after it, and what differs in the end."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.ops import Lane
from tests.support.children import Children, Ended, Kill
from tests.support.faults import Fault
from tests.support.programs import Command, Program

_CALLS = ("write", "sync", "rename", "mkdir", "create", "unlink", "link", "reserve", "truncate")
_MOST_IN_A_ROW = 6
_STAGES = {
    "root": r"/zarr\.json(\.new)?$",
    "manifest": r"/manifests",
    "metrics": r"/metrics\.jsonl|/run\.json|/converted\.json",
    "model's folder": r"\.partial-|/out/?$",
    "reading the source": r"/model/|/rows\.jsonl|/run\.yaml",
    "lock": r"/LOCK$|/CREATING$",
    "slots": r"/slots/|/drives/|/[abc]/|/shards/",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One way to kill a command: at a moment, in a lane, or at a call."""

    how: str
    kill: Kill | None = None
    fault: Fault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """What one kill met: the command, the lanes that were at work, the last call, and its part."""

    command: str
    how: str
    lanes: Sequence[str]
    stage: str
    call: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A command killed some times and gone on with; ``wrong`` says what is, "" if nothing."""

    program: str
    kills: Sequence[Killed]
    wrong: str


def at_moment(rng: random.Random, longest_s: float) -> Blow:
    """Return a kill at a moment of chance."""
    delay_us = int(rng.uniform(0.0, longest_s) * 1e6)
    return Blow(how="moment", kill=Kill(delay_us=delay_us))


def in_lane(lane: str, number: int, delay_us: int = 0) -> Blow:
    """Return a kill that comes while a lane does its operation ``number``, or soon after."""
    return Blow(how=f"lane {lane}", kill=Kill(lane=lane, number=number, delay_us=delay_us))


def at_call(program: Program, op: str, number: int, *, torn: bool = False) -> Blow:
    """Return a kill just before a call, or with its bytes half written."""
    kill = "torn" if torn else "before"
    fault = Fault(op=op, path=f"{program.site.work}/", after=number, count=1, kill=kill)
    return Blow(how=f"{op} {kill}", fault=fault)


def at_path(op: str, part: str, *, after: int = 0, torn: bool = False) -> Blow:
    """Return a kill at the first call, or one after it, on a path with ``part`` in it."""
    kill = "torn" if torn else "before"
    return Blow(how=f"{op} {kill}", fault=Fault(op=op, path=part, after=after, count=1, kill=kill))


def any_blow(program: Program, rng: random.Random) -> Blow:
    """Return a kill of any sort that this program may meet."""
    kinds = ["moment", "call", "lane"] if program.computes else ["moment", "call"]
    kind = rng.choice(kinds)
    if kind == "moment":
        return at_moment(rng, program.elapsed_s)
    if kind == "lane":
        lane = rng.choice(list(Lane))
        return in_lane(str(lane), rng.randrange(40), rng.choice([0, 0, rng.randrange(3000)]))
    op = rng.choice([op for op in _CALLS if program.calls[op]])
    return at_call(program, op, rng.randrange(program.calls[op]), torn=rng.random() < 0.3)


def strike(children: Children, command: Command, blow: Blow, part: str) -> Ended:
    """Run a command into a kill."""
    fault = blow.fault or Fault(op="write", path=part, after=1 << 40)
    watched = [Fault(op=op, path=part, after=1 << 40) for op in _CALLS if op != fault.op]
    return children.run(command, fault, *watched, kill=blow.kill)


def tell(program: Program, children: Children, blows: Sequence[Blow]) -> Story:
    """Kill a command, go on into the next kill, and at last to the end."""
    program.reset()
    kills: list[Killed] = []
    command = program.command
    for blow in blows:
        ended = strike(children, command, blow, f"{program.site.base}/")
        if ended.code == 0:
            return _story(program, kills, program.differs())
        if ended.code != -9 or ended.hung:
            return _story(program, kills, f"{blow.how}: {ended.code} {ended.err[-2000:]}")
        kills.append(_killed(command, blow, ended))
        if wrong := program.remains(ended):
            return _story(program, kills, wrong)
        command = program.again()
    return _story(program, kills, program.go_on())


def any_story(program: Program, children: Children, rng: random.Random) -> Story:
    """Tell of as many kills in a row as chance has it."""
    blows = [any_blow(program, rng) for _ in range(rng.randint(1, _MOST_IN_A_ROW))]
    return tell(program, children, blows)


def _story(program: Program, kills: Sequence[Killed], wrong: str) -> Story:
    return Story(program=program.name, kills=tuple(kills), wrong=wrong)


def _killed(command: Command, blow: Blow, ended: Ended) -> Killed:
    return Killed(
        command=" ".join(map(str, command[:2])),
        how=blow.how,
        lanes=tuple(f"{lane} {kind}" for lane, kind in ended.lanes.items()),
        stage=_stage(ended.last),
        call=ended.last,
    )


def _stage(call: str) -> str:
    """Return what part of a command's work a call belongs to."""
    for stage, pattern in _STAGES.items():
        if re.search(pattern, call):
            return stage
    return "other" if call else "before the first call"
