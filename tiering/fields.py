"""Reading a JSON document strictly: every key is asked for once, none is left over. Pure."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tiering.errors import CorruptionError, RefusedError

MOST = (1 << 63) - 1  # of integers: more has no meaning anywhere
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 12


def shown(value: object) -> str:
    """Return a value for a message: escaped, and cut where it is long or deep."""
    return _SHORT.repr(value)


def parse_object(data: bytes, source: Path) -> dict[str, Any]:
    """Return the JSON object that ``data``, the content of ``source``, spells."""
    document = parse(data, source)
    if not isinstance(document, dict):
        raise CorruptionError(
            f"{source}: found {type(document).__name__}, expected an object", file=source
        )
    return document


def parse(data: bytes, source: Path) -> Any:
    """Return what ``data``, the content of ``source``, spells: strict JSON in UTF-8."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document = dict(pairs)
        if len(document) != len(pairs):
            raise CorruptionError(f"{source}: a key appears twice in one object", file=source)
        return document

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{source}: no valid JSON ({error})", file=source) from error


class Fields:
    """Strict reading of one JSON object: every key is asked for once, none is left over."""

    def __init__(self, document: Any, source: Path, where: str) -> None:
        self.source = source
        self._where = where
        if not isinstance(document, dict):
            raise CorruptionError(
                f"{source}: {plain(where) or 'document'}: found {type(document).__name__}, "
                "expected an object",
                file=source,
            )
        self._left: dict[str, Any] = dict(document)

    def _name(self, key: str) -> str:
        """Return a key of this object as seen from the top of the document."""
        return f"{self._where}.{key}" if self._where else key

    def _fault(self, key: str, what: str) -> CorruptionError:
        return CorruptionError(f"{self.source}: {plain(self._name(key))}: {what}", file=self.source)

    def error(self, key: str, found: object, expected: object) -> CorruptionError:
        """Return what says that a key holds something else than it must."""
        wanted = expected if isinstance(expected, str) else shown(expected)
        return self._fault(key, f"found {shown(found)}, expected {wanted}")

    def value(self, key: str) -> Any:
        """Return what a key holds."""
        if key not in self._left:
            raise self._fault(key, "missing")
        return self._left.pop(key)

    def check_format(self, newest: int) -> None:
        """Refuse a document whose ``format`` is above ``newest``, and one that is damaged."""
        if (found := self.integer("format", 1)) > newest:
            raise RefusedError(
                f"{self.source}: written in format {found}, this program reads up to format "
                f"{newest}; use a newer version"
            )

    def integer(self, key: str, minimum: int, most: int = MOST) -> int:
        """Return an integer from ``minimum`` to ``most``."""
        value = self.value(key)
        if not _is_integer(value) or value < minimum:
            raise self.error(key, value, f"an integer of at least {minimum}")
        if value > most:
            raise self.error(key, value, f"an integer of at most {most}")
        return int(value)

    def optional_integer(self, key: str, minimum: int) -> int | None:
        """Return an integer of at least ``minimum``, or None for null."""
        if self._left.get(key, 0) is None:
            del self._left[key]
            return None
        return self.integer(key, minimum)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers that are not negative."""
        value = self.value(key)
        if not isinstance(value, list) or not all(map(_is_count, value)):
            raise self.error(key, value, "a list of integers of at least 0")
        return tuple(value)

    def fraction(self, key: str) -> float:
        """Return a number from 0 to 1."""
        value = self.value(key)
        if not (_is_integer(value) or isinstance(value, float)) or not 0 <= value <= 1:
            raise self.error(key, value, "a number from 0 to 1")
        return float(value)

    def boolean(self, key: str) -> bool:
        """Return true or false."""
        value = self.value(key)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def text(self, key: str) -> str:
        """Return any text."""
        value = self.value(key)
        if not isinstance(value, str):
            raise self.error(key, value, "text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of any texts."""
        value = self.value(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, value, "a list of texts")
        return tuple(value)

    def pattern(self, key: str, pattern: re.Pattern[str]) -> str:
        """Return a text that ``pattern`` matches."""
        value = self.value(key)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise self.error(key, value, f"text that matches {pattern.pattern}")
        return value

    def patterns(self, key: str, pattern: re.Pattern[str]) -> dict[str, str]:
        """Return an object of texts that ``pattern`` matches."""
        found = self.mapping(key)
        for name, value in found.items():
            if not isinstance(value, str) or not pattern.fullmatch(value):
                raise self.error(f"{key}.{name}", value, f"text that matches {pattern.pattern}")
        return found

    def member(self, key: str, allowed: Collection[str]) -> str:
        """Return one of ``allowed``."""
        value = self.value(key)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(key, value, f"one of {', '.join(allowed)}")
        return value

    def optional_member(self, key: str, allowed: Collection[str]) -> str | None:
        """Return one of ``allowed``, or None for null."""
        if self._left.get(key, "") is None:
            del self._left[key]
            return None
        return self.member(key, allowed)

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object as it is."""
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.error(key, value, "an object")
        return value

    def counts(self, key: str) -> dict[str, int]:
        """Return an object of integers that are not negative."""
        found = self.mapping(key)
        for name, value in found.items():
            if not _is_count(value):
                raise self.error(f"{key}.{name}", value, "an integer of at least 0")
        return found

    def child(self, key: str) -> Fields:
        """Return an object, to be read as strictly as this one."""
        return Fields(self.mapping(key), self.source, self._name(key))

    def items(self, key: str) -> Iterator[Fields]:
        """Yield the objects of a list."""
        value = self.value(key)
        if not isinstance(value, list):
            raise self.error(key, value, "a list")
        for index, item in enumerate(value):
            yield Fields(item, self.source, self._name(f"{key}[{index}]"))

    def named(self, key: str) -> Iterator[tuple[str, Fields]]:
        """Yield the objects of an object, by name."""
        for name, item in self.mapping(key).items():
            yield name, Fields(item, self.source, self._name(f"{key}.{name}"))

    def equal(self, key: str, value: object, expected: str) -> None:
        """Refuse anything but ``value``; ``expected`` says what that is."""
        found = self.value(key)
        if found != value:
            raise self.error(key, found, expected)

    def finish(self) -> None:
        """Refuse keys that nobody asked for."""
        if self._left:
            raise self._fault(next(iter(self._left)), "unknown key")


def plain(name: str) -> str:
    """Return text that came from a file for a message: as it is, if that is short and printable."""
    return name if name.isprintable() and len(name) <= 400 else shown(name)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_integer(value) and 0 <= value <= MOST
