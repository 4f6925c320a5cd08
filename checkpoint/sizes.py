"""Sizes as people write them. Pure."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(text: str) -> int:
    """Return the bytes of "8GiB", "5GB", "1.5G" or "4096"; "GB" is 10^9, "GiB" and "G" are 2^30.

    Raises:
        ValueError: It is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is no size; write 8GiB, 500MB or a number of bytes")
    number, unit, binary = match[1], match[2].lower(), match[3]
    decimal = unit and not binary and text.strip().lower().endswith("b")
    return int(float(number) * (1000 if decimal else 1024) ** _POWERS[unit])


def format_size(nbytes: int) -> str:
    """Return ``nbytes`` for people, as "1.5 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{nbytes / 1024**power:.{1 if power else 0}f} {units[power]}"
