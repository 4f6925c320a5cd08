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
from tests.support.kill_trials import any_story, at_call, at_path, in_lane, tell
from tests.support.programs import (
    Convert,
    ConvertEncoded,
    Encode,
    ExportOver,
    Move,
    Program,
    Resume,
    ResumeInRam,
    Train,
)

Made = Callable[[type[Program]], Program]


def test_a_run_killed_in_each_lane_ends_with_the_same_bits(
    program: Made, children: Children
) -> None:
    lanes = list(map(str, Lane))
    story = tell(program(Resume), children, [in_lane(lane, 1) for lane in lanes])
    assert story.wrong == ""
    for lane, killed in zip(lanes, story.kills, strict=True):
        assert any(busy.startswith(f"{lane} ") for busy in killed.lanes)


COMMIT = [  # in the order in which they come; the run before it made generation 2
    ("write", "/metrics.jsonl", True),
    ("mkdir", "/manifests/3", False),
    ("write", "/manifests/3/checksums.bin", True),
    ("sync", "/manifests/3/manifest.json", False),
    ("write", "/zarr.json.new", True),
    ("rename", "/zarr.json", False),
    ("unlink", "/manifests/2/manifest.json", False),
]


def test_a_run_killed_in_each_part_of_a_commit_ends_with_the_same_bits(
    program: Made, children: Children
) -> None:
    run = program(ResumeInRam)
    story = tell(run, children, [at_path(op, part, torn=torn) for op, part, torn in COMMIT])
    assert story.wrong == ""
    assert [killed.call.split()[0] for killed in story.kills] == [op for op, _, _ in COMMIT]


def test_a_run_killed_when_its_store_is_there_and_nothing_says_of_which_model(
    program: Made, children: Children
) -> None:
    story = tell(program(Train), children, [at_path("rename", "/run/converted.json", after=1)])
    assert (story.wrong, len(story.kills)) == ("", 1)


@pytest.mark.parametrize(
    "kind", [Convert, ConvertEncoded, ExportOver, Move, Encode], ids=lambda kind: kind.name
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


def test_a_run_killed_at_moments_of_chance_ends_with_the_same_bits(
    program: Made, children: Children
) -> None:
    story = any_story(program(Train), children, random.Random(7))
    assert story.wrong == "", story
