"""Reading a JSON document strictly: every field is asked for by type, and nothing is left over."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from tiering.errors import CorruptionError
from tiering.fields import MOST, parse, shown

T = TypeVar("T")


class Fields:
    """One JSON object of a document, consumed field by field; errors say where they are."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise CorruptionError(f"{where}: expected an object, found {_kind(value)}")
        self._rest: dict[str, Any] = dict(value)
        self._where = where

    @classmethod
    def parse(cls, data: bytes, file: str) -> Self:
        """Return the top object of the JSON document ``data``."""
        return cls(parse(data, Path(file)), file)

    def _take(self, name: str, kind: type[T]) -> T:
        where = f"{self._where}: {name}"
        if name not in self._rest:
            raise CorruptionError(f"{where}: missing")
        value = self._rest.pop(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CorruptionError(f"{where}: expected {kind.__name__}, found {_kind(value)}")
        return value

    def text(self, name: str) -> str:
        """Return a string."""
        return self._take(name, str)

    def integer(self, name: str) -> int:
        """Return a whole number that is not negative."""
        if (value := self._take(name, int)) < 0:
            raise CorruptionError(f"{self._where}: {name}: {shown(value)} is negative")
        if value > MOST:
            raise CorruptionError(f"{self._where}: {name}: {shown(value)} is too much")
        return value

    def boolean(self, name: str) -> bool:
        """Return true or false."""
        return self._take(name, bool)

    def choice(self, name: str, allowed: Collection[str]) -> str:
        """Return a string that is one of ``allowed``."""
        if (value := self.text(name)) not in allowed:
            raise CorruptionError(f"{self._where}: {name}: unknown value {shown(value)}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers that are not negative."""
        values = self._take(name, list)
        if any(type(value) is not int or not 0 <= value <= MOST for value in values):
            raise CorruptionError(
                f"{self._where}: {name}: expected whole numbers, found {shown(values)}"
            )
        return tuple(values)

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self._take(name, list)
        if not all(isinstance(value, str) for value in values):
            raise CorruptionError(f"{self._where}: {name}: expected a list of strings")
        return tuple(values)

    def child(self, name: str) -> Fields:
        """Return a nested object."""
        return Fields(self._take(name, dict), f"{self._where}: {name}")

    def objects(self, name: str) -> list[Fields]:
        """Return a list of nested objects."""
        values = self._take(name, list)
        return [Fields(value, f"{self._where}: {name}[{i}]") for i, value in enumerate(values)]

    def texts(self) -> Mapping[str, str]:
        """Return all that is left as a mapping from names to strings."""
        return {name: self.text(name) for name in list(self._rest)}

    def finish(self) -> None:
        """Refuse fields that nobody asked for."""
        if self._rest:
            raise CorruptionError(f"{self._where}: unknown field {shown(next(iter(self._rest)))}")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
