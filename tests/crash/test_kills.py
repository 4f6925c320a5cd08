"""A command killed at any moment goes on as if nothing had happened.

Here every lane, every part of a commit and every command is met once or a few times;
``scripts/kill_many.py`` kills by the thousand.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from megatrain.ops import Lane
from tests.support.children import Children
from tests.support.kill_trials import Blow, any_story, at_call, in_lane, tell
from tests.support.programs import (
    Convert,
    ConvertEncoded,
    Encode,
    Export,
    ExportOver,
    Move,
    Program,
    Resume,
    ResumeInRam,
    Train,
)

Made = Callable[[type[Program]], Program]


@pytest.mark.parametrize("lane", list(Lane), ids=str)
def test_a_run_killed_in_a_lane_ends_with_the_same_bits(
    program: Made, children: Children, lane: Lane
) -> None:
    story = tell(program(Resume), children, [in_lane(str(lane), 1)])
    assert story.wrong == ""
    assert any(busy.startswith(f"{lane} ") for busy in story.kills[0].lanes)


def commits(program: Program) -> list[Blow]:
    """Return kills from the first write to the last sync of a commit, later ones first."""
    last = {op: number - 1 for op, number in program.calls.items()}
    return [
        at_call(program, "unlink", last["unlink"]),
        at_call(program, "sync", last["sync"]),
        at_call(program, "rename", last["rename"]),
        at_call(program, "write", last["write"], torn=True),
        at_call(program, "mkdir", last["mkdir"]),
    ]


def test_a_run_killed_in_each_part_of_a_commit_ends_with_the_same_bits(
    program: Made, children: Children
) -> None:
    run = program(ResumeInRam)
    for blow in commits(run):
        story = tell(run, children, [blow])
        assert (story.wrong, len(story.kills)) == ("", 1), blow.how


@pytest.mark.parametrize(
    "kind", [Convert, ConvertEncoded, Export, ExportOver, Move, Encode], ids=lambda kind: kind.name
)
def test_a_command_killed_again_and_again_ends_as_if_it_had_not_been(
    program: Made, children: Children, kind: type[Program]
) -> None:
    victim = program(kind)
    last = {op: number - 1 for op, number in victim.calls.items()}
    blows = [
        at_call(victim, "write", last["write"] // 2, torn=True),
        at_call(victim, "rename", last["rename"]),
        at_call(victim, "sync", last["sync"]),
    ]
    story = tell(victim, children, blows)
    assert story.wrong == ""
    assert story.kills


@pytest.mark.parametrize("kind", [Train, ResumeInRam], ids=lambda kind: kind.name)
def test_a_run_killed_at_moments_of_chance_ends_with_the_same_bits(
    program: Made, children: Children, kind: type[Program]
) -> None:
    story = any_story(program(kind), children, random.Random(7))
    assert story.wrong == "", story
