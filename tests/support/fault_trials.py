"""One fault in one command: what came of it, and whether it was what may come of it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.support.children import Children, Ended
from tests.support.faults import HALF, Fault
from tests.support.programs import Program

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FOR_EVER = 1 << 30


class Verdict(StrEnum):
    """What came of a fault; the last five may not be."""

    CLEAN = "failed cleanly"
    HARMLESS = "harmless"
    UNMET = "not met"
    SILENT = "silent"
    HUNG = "hung"
    LOST = "lost"
    UNTOLD = "badly told"

    @property
    def allowed(self) -> bool:
        return self in (Verdict.CLEAN, Verdict.HARMLESS, Verdict.UNMET)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A kind of fault.

    Attributes:
        lasting: From the n-th call on, else only the n-th.
        everywhere: One run meets it at every call; so nothing but n = 0 is worth trying.
        stride: Every so many n are worth trying: its like is tried at all.
    """

    name: str
    op: str
    errno: int = 0
    lasting: bool = False
    everywhere: bool = False
    stride: int = 1
    delay_ms: int = 0
    moves: int = HALF

    def at(self, number: int, part: str) -> Fault:
        """Return the fault at call ``number`` on paths with ``part`` in them."""
        return Fault(
            op=self.op,
            path=part,
            after=number,
            count=_FOR_EVER if self.lasting or self.everywhere else 1,
            every=2 if self.errno == errno.EINTR else 1,  # so that it succeeds when made again
            errno=self.errno,
            moves=self.moves,
            delay_ms=self.delay_ms,
        )

    def numbers(self, calls: int) -> range:
        """Return every n to try of so many calls."""
        return range(min(calls, 1)) if self.everywhere else range(0, calls, self.stride)

    @property
    def passes(self) -> bool:
        """Whether the command has to do all the same."""
        return self.errno == errno.EINTR or not self.errno


def _failing(op: str, code: int, *, lasting: bool = False, stride: int = 1) -> FaultKind:
    name = f"{op} {errno.errorcode[code]}{' from then on' if lasting else ''}"
    return FaultKind(name=name, op=op, errno=code, lasting=lasting, stride=stride)


def _passing(op: str, how: str, code: int = 0, delay_ms: int = 0) -> FaultKind:
    return FaultKind(name=f"{op} {how}", op=op, errno=code, everywhere=True, delay_ms=delay_ms)


KINDS: Sequence[FaultKind] = (
    _failing("write", errno.ENOSPC, lasting=True),
    _failing("write", errno.EIO),
    _failing("write", errno.EDQUOT, stride=5),
    _passing("write", "EINTR", errno.EINTR),
    _passing("write", "short"),
    _passing("write", "slow", delay_ms=2),
    _failing("read", errno.EIO),
    _passing("read", "EINTR", errno.EINTR),
    _passing("read", "short"),
    _passing("read", "slow", delay_ms=2),
    _failing("sync", errno.EIO),
    _failing("sync", errno.EIO, lasting=True, stride=3),
    _failing("sync", errno.ENOSPC, stride=3),
    _passing("sync", "slow", delay_ms=5),
    _failing("reserve", errno.ENOSPC),
    _failing("reserve", errno.EIO, stride=3),
    _failing("reserve", errno.EDQUOT, stride=3),
    _passing("reserve", "EINTR", errno.EINTR),
    _failing("truncate", errno.EIO),
    _failing("create", errno.ENOSPC),
    _failing("create", errno.EIO, stride=5),
    _passing("create", "EINTR", errno.EINTR),
    _failing("open", errno.EIO),
    _passing("open", "EINTR", errno.EINTR),
    _failing("list", errno.EIO),
    _failing("mkdir", errno.ENOSPC),
    _failing("mkdir", errno.EIO, stride=5),
    _failing("unlink", errno.EIO),
    _failing("rename", errno.EIO),
    _failing("rename", errno.ENOSPC, stride=3),
    _failing("link", errno.ENOSPC),
    _failing("link", errno.EIO, stride=5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of one fault; ``why`` says what is wrong if it may not be."""

    program: str
    kind: str
    number: int
    verdict: Verdict
    why: str = ""
    call: str = ""

    def __str__(self) -> str:
        return (
            f"{self.program}, {self.kind} at {self.number} ({self.call}): {self.verdict} {self.why}"
        )


def attempt(program: Program, children: Children, kind: FaultKind, number: int) -> Trial:
    """Run the command with one fault, judge what came of it, and go on without the fault."""
    program.reset()
    fault = kind.at(number, f"{program.site.base}/")
    ended = children.run(program.command, fault)
    verdict, why = _judge(program, kind, ended)
    return Trial(
        program=program.name,
        kind=kind.name,
        number=number,
        verdict=verdict,
        why=why,
        call=ended.last,
    )


def _judge(program: Program, kind: FaultKind, ended: Ended) -> tuple[Verdict, str]:
    if ended.hung:
        return Verdict.HUNG, ended.err[-3000:]
    if ended.code == 0:
        return _judge_success(program, kind, ended)
    wrong = program.remains(ended) or program.go_on()
    if wrong:
        return Verdict.LOST, f"{wrong}\n{ended.err[-2000:]}"
    if untold := badly_told(ended, kind, str(program.site.base)):
        return Verdict.UNTOLD, f"{untold}\n{ended.err[-3000:]}"
    return Verdict.CLEAN, ""


def _judge_success(program: Program, kind: FaultKind, ended: Ended) -> tuple[Verdict, str]:
    if wrong := program.differs():
        return Verdict.SILENT, wrong
    if not ended.hits[0]:
        return Verdict.UNMET, ""
    if kind.op == "sync" and not kind.passes:
        return Verdict.SILENT, "a failed sync, and all is said to be durable"
    return Verdict.HARMLESS, ""


def badly_told(ended: Ended, kind: FaultKind, base: str) -> str:
    """Return what is missing in how a failed command told of a fault; "" if nothing."""
    _, found, text = f"\n{ended.err}".rpartition("\nerror: ")
    full = kind.errno in FULL
    if "Traceback" in ended.err or not found:
        return f"code {ended.code} without a message"
    if ended.code != 5 and not (full and ended.code == 3):
        return f"code {ended.code}"
    if base not in text:
        return "no path"
    if kind.passes:
        return "should have gone on"
    if ended.code == 5 and os.strerror(kind.errno) not in text:
        return "no reason"
    if full and not re.search(r"\d+ B free|free B", text):
        return "no free bytes"
    if kind.op in ("write", "reserve") and not re.search(r"of \d+ B|need", text):
        return "no wanted bytes"
    return ""
