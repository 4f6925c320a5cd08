"""The disk images that a power cut may leave, and the search among them for one that is wrong."""

from __future__ import annotations

import itertools
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.power_cut import Effect, History, Part, Tree, materialise

SECTOR, PAGE = 512, 4096
_ONE_OF_MANY = re.compile(r"\d+|\b[a-z]\b|[0-9a-f]{8,}")

Choice = tuple[bool | Part, ...]  # for each effect that may be lost: lost, there, or in part
Check = Callable[[Any], None]  # gets what is allowed; raises if the files are anything else


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many images are made at each point.

    Attributes:
        every_subset_of: Up to so many effects that may be lost, every subset of them.
        each: Of how many of them it is tried to lose only them, all else, or what comes after;
            the newest and a draw of the others.
        random_subsets: How many more are drawn, with effects in part among them.
        parts_alone: Whether an effect in part is also tried with all others lost.
        after_each: Whether there is a point after every effect, or only before what makes some
            durable, where all of them may still be lost.
        kinds: Whether of effects that are alike, as those that fill a slot, only one is taken.
        drawn: Which part of the images is drawn, besides the telling ones.
    """

    every_subset_of: int = 7
    each: int = 1000
    random_subsets: int = 24
    parts_alone: bool = True
    after_each: bool = True
    kinds: bool = False
    drawn: float = 1.0


THOROUGH = Bounds()
QUICK = Bounds(
    every_subset_of=1,
    each=12,
    random_subsets=0,
    parts_alone=False,
    after_each=False,
    kinds=True,
    drawn=0.04,
)


class Violation(AssertionError):
    """A power cut at ``point`` may leave something that the check refuses."""

    def __init__(self, history: History, time: int, image: str, error: BaseException) -> None:
        self.error = error
        last = [e.text for e in history.effects if e.begin <= time][-1:]
        super().__init__(f"cut after {last}, {image}: {type(error).__name__}: {error}")


@dataclass(slots=True)
class Count:
    """How much was tried: points in time, images, and those of them that differ."""

    points: int = 0
    images: int = 0
    different: int = 0

    def __str__(self) -> str:
        return f"{self.points} points, {self.images} images, {self.different} of them different"


@dataclass(slots=True, kw_only=True)
class Search:
    """Materialises and checks the images of histories, each one only once.

    With ``collect`` it goes on after a violation, and keeps it in ``violations``.
    """

    check: Check
    collect: bool = False
    violations: list[Violation] = field(default_factory=list)
    bounds: Bounds = field(default_factory=Bounds)
    seed: int = 0
    count: Count = field(default_factory=Count)
    _seen: set[Any] = field(default_factory=set)

    def run(self, history: History, *, since: int = 0, killed: int = 0) -> Count:
        """Check every image of every point from ``since`` on.

        With ``killed``, when the process was killed before this one, only those in which something
        is lost of what was visible then.

        Raises:
            Violation: One of them is wrong.
        """
        chance = random.Random(self.seed)
        durable = history.durable_from()
        for time in self._points(history, since):
            self.count.points += 1
            begun = [
                (effect, durable[number] <= time)
                for number, effect in enumerate(history.effects)
                if effect.begin <= time
            ]
            pending = [effect for effect, settled in begun if not settled]
            if killed:
                found = choices_after_kill(pending, killed, self.bounds, chance)
            else:
                found = choices(pending, self.bounds, chance)
            for text, choice in found:
                if not killed and not telling(text) and chance.random() >= self.bounds.drawn:
                    continue
                self.count.images += 1
                self._try(history, time, text, history.tree(_chosen(begun, choice)))
        return self.count

    def _points(self, history: History, since: int) -> Iterator[int]:
        points = history.points() if self.bounds.after_each else history.last_points()
        return (time for time in points if time >= since)

    def _try(self, history: History, time: int, text: str, tree: Tree) -> None:
        allowed = history.allowed(time)
        key = (frozenset(i for i in tree.items() if not i[0].endswith("LOCK")), str(allowed))
        if key in self._seen:
            return
        self._seen.add(key)
        self.count.different += 1
        materialise(tree, history.root)
        try:
            self.check(allowed)
        except Exception as error:
            found = Violation(history, time, text, error)
            if not self.collect:
                raise found from error
            self.violations.append(found)


def _chosen(
    begun: Sequence[tuple[Effect, bool]], choice: Choice
) -> list[tuple[Effect, Part | None]]:
    chosen: list[tuple[Effect, Part | None]] = []
    choices_left = iter(choice)
    there: set[int] = set()
    for effect, settled in begun:
        how = True if settled else next(choices_left)
        if how is False or (effect.needs is not None and id(effect.needs) not in there):
            continue
        there.add(id(effect))
        chosen.append((effect, how if isinstance(how, Part) else None))
    return chosen


# -- which of them --------------------------------------------------------------------------------


def choices(
    pending: Sequence[Effect], bounds: Bounds, chance: random.Random
) -> Iterator[tuple[str, Choice]]:
    """Yield which effects reached the drive, in words and as a choice."""
    n = len(pending)
    yield "all lost", (False,) * n
    yield "nothing lost", (True,) * n
    if n <= bounds.every_subset_of:
        for choice in itertools.product((False, True), repeat=n):
            yield _words(pending, choice), choice
    else:
        yield from _systematic(pending, _some(pending, bounds, chance), bounds)
    yield from _in_part(pending, _some(pending, bounds, chance), bounds)
    for _ in range(bounds.random_subsets if n > 1 else 0):
        drawn = tuple(_draw(effect, chance) for effect in pending)
        yield _words(pending, drawn), drawn


def choices_after_kill(
    pending: Sequence[Effect], killed: int, bounds: Bounds, chance: random.Random
) -> Iterator[tuple[str, Choice]]:
    """Yield in which ways something is lost that was visible when a process was killed."""
    n = len(pending)
    old = tuple(effect.begin <= killed for effect in pending)
    if not any(old):
        return
    yield "all lost", (False,) * n
    yield "all lost that was there before", tuple(not was for was in old)
    before = sum(old)  # they come first
    for k in _some(pending[:before], bounds, chance):
        yield f"only {pending[k].text}", tuple(i == k for i in range(n))
        yield f"all but {pending[k].text}", tuple(i != k for i in range(n))


def telling(text: str) -> bool:
    """Whether only what is durable is there, or that and one change that hides or removes."""
    return text.startswith(("all lost", "only rename", "only remove", "only exchange"))


def _some(pending: Sequence[Effect], bounds: Bounds, chance: random.Random) -> list[int]:
    """Return which effects are tried: the newest of each kind, or of all, and others."""
    if bounds.kinds:
        kinds = {_ONE_OF_MANY.sub("#", e.text): number for number, e in enumerate(pending)}
        return sorted(sorted(kinds.values())[-bounds.each :])
    n = len(pending)
    newest = max(0, n - bounds.each // 2)
    others = chance.sample(range(newest), min(newest, bounds.each - (n - newest)))
    return sorted([*others, *range(newest, n)])


def _systematic(
    pending: Sequence[Effect], some: Sequence[int], bounds: Bounds
) -> Iterator[tuple[str, Choice]]:
    n = len(pending)
    for k in some:
        effect = pending[k]
        yield f"only {effect.text}", tuple(i == k for i in range(n))
        yield f"all but {effect.text}", tuple(i != k for i in range(n))
        if bounds.after_each:
            yield f"nothing after {effect.text}", tuple(i <= k for i in range(n))
    names = tuple(effect.folder >= 0 for effect in pending)
    yield "names without bytes", names
    yield "bytes without names", tuple(not name for name in names)
    for device in sorted({effect.device for effect in pending}):
        there = tuple(effect.device == device for effect in pending)
        yield f"only what is on device {device}", there
        yield f"only the names on device {device}", tuple(map(operator.and_, there, names))
        yield f"all but what is on device {device}", tuple(not here for here in there)


def _in_part(
    pending: Sequence[Effect], some: Sequence[int], bounds: Bounds
) -> Iterator[tuple[str, Choice]]:
    lengths = tuple(
        effect.folder >= 0 or Part(text="", kept=(), lengthened=True) for effect in pending
    )
    yield "names and lengths without bytes", lengths
    for device in sorted({effect.device for effect in pending}):
        there = (effect.device == device for effect in pending)
        text = f"only names and lengths on device {device}"
        yield text, tuple(here and how for here, how in zip(there, lengths, strict=True))
    for k in some:
        effect = pending[k]
        for part in parts(effect):
            text = f"of {effect.text} {part.text}"
            yield f"{text}, all else", tuple(i != k or part for i in range(len(pending)))
            if bounds.parts_alone:
                yield f"{text}, nothing else", tuple(i == k and part for i in range(len(pending)))


def parts(effect: Effect) -> list[Part]:
    """Return the ways in which a write may reach the drive in part."""
    n = len(effect.data)
    if not n:
        return []

    def part(text: str, *kept: tuple[int, int], lengthened: bool) -> Part:
        return Part(text=text, kept=kept, lengthened=lengthened)

    found = [part("only the length", lengthened=True)]
    if n <= SECTOR:
        return found
    last = (n - 1) // SECTOR * SECTOR
    found += [
        part("the first sector", (0, SECTOR), lengthened=False),
        part("all but the first sector", (SECTOR, n), lengthened=True),
        part("all but the last sector", (0, last), lengthened=True),
    ]
    if n > 2 * SECTOR:
        odd = tuple((at, min(at + SECTOR, n)) for at in range(SECTOR, n, 2 * SECTOR))
        found.append(part("every second sector", *odd, lengthened=True))
    if n > PAGE:
        found.append(part("the first page", (0, PAGE), lengthened=False))
        found.append(part("all but the first page", (PAGE, n), lengthened=True))
    return found


def _draw(effect: Effect, chance: random.Random) -> bool | Part:
    if effect.data and chance.random() < 0.3:
        return chance.choice(parts(effect))
    return chance.random() < 0.5


def _words(pending: Sequence[Effect], choice: Choice) -> str:
    lost = [effect.text for effect, how in zip(pending, choice, strict=True) if how is False]
    torn = [
        f"{effect.text} {how.text}"
        for effect, how in zip(pending, choice, strict=True)
        if isinstance(how, Part)
    ]
    return f"lost: {lost}, in part: {torn}"
