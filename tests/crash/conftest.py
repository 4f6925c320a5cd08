"""Commands in children that need no imports, and a folder for them to work in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.children import Children
from tests.support.faults import build_shim
from tests.support.held_runs import Driver
from tests.support.programs import Program, Site


@pytest.fixture(scope="session")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    with Children(build_shim(tmp_path_factory.mktemp("shim"))) as children:
        yield children


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Starts commands that run beside each other, and can be held in the middle of a transfer."""
    with Driver(build_shim(tmp_path_factory.mktemp("shim"))) as driver:
        yield driver


@pytest.fixture(scope="session")
def program(
    tmp_path_factory: pytest.TempPathFactory, children: Children
) -> Callable[[type[Program]], Program]:
    """Return a program of a kind, made when it is first asked for."""
    site = Site(tmp_path_factory.mktemp("site"))
    made: dict[type[Program], Program] = {}

    def program(kind: type[Program]) -> Program:
        if kind not in made:
            made[kind] = kind(site, children)
        return made[kind]

    return program
