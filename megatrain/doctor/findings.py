"""What the doctor says: one line for each thing it looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tiering.errors import MegatrainError


class Verdict(StrEnum):
    """What a finding means for a training run."""

    OK = "ok"
    NOTE = "note"  # good to know; nothing to be done
    WARNING = "warning"  # works, but slowly or at a risk
    PROBLEM = "problem"  # a run would fail, or lose what it committed
    UNKNOWN = "unknown"  # cannot be seen from here
    NONE = "none here"  # this machine has no such thing, and a run needs none


BAD = frozenset({Verdict.WARNING, Verdict.PROBLEM})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What was looked at.
        verdict: What it means.
        found: What was seen, and how where that matters.
        advice: A way out; empty where none is needed.
        values: The numbers behind ``found``, with units in their names.
    """

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Findings that belong together."""

    title: str
    findings: tuple[Finding, ...]


def looked_at(
    subject: str, look: Callable[[], Iterable[Finding]], *, failing: Verdict = Verdict.UNKNOWN
) -> tuple[Finding, ...]:
    """Return what ``look`` finds until the system stops it, and what stopped it.

    ``failing`` is what it means that the system refuses; a missing package or an error of our own
    is always a problem.
    """
    found: list[Finding] = []
    try:
        found.extend(look())
    except OSError as error:
        told = f"the system did not allow it: {error.strerror or error}"
        found.append(Finding(subject=subject, verdict=failing, found=told))
    except (ImportError, MegatrainError) as error:
        found.append(Finding(subject=subject, verdict=Verdict.PROBLEM, found=str(error)))
    return tuple(found)
