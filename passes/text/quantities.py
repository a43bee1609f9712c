"""Quantities as text, each with its unit: what people read in plans, diffs and errors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from numbers import Integral

Text = Callable[[float], str]
"""The function from a quantity of one kind to its text."""

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_NBYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def seconds(value: float) -> str:
    """Seconds in the unit that leaves one to three digits before the point: `1.23 ms`, `0 s`."""
    if not value or not math.isfinite(value):
        return f"{value:g} s"
    scale, unit = next(((s, u) for s, u in _SECONDS if _digits(abs(value) / s) >= 1), _SECONDS[-1])
    return f"{_three(value / scale)} {unit}"


def nbytes(value: float) -> str:
    """Bytes in powers of 1024: `17 B`, `4.50 GiB`."""
    if not math.isfinite(value):
        return f"{value:g} B"
    power = 0
    while _digits(abs(value) / 1024**power) >= 1000 and power < len(_NBYTES) - 1:
        power += 1
    scaled = value / 1024**power
    return f"{scaled:.0f} B" if power == 0 else f"{_three(scaled)} {_NBYTES[power]}"


def parse_nbytes(text: str) -> float | None:
    """The number of bytes in a text such as `12 GiB`, `1.5 GB` or `4096`; None for any other text."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgtp]?)(i?)b?\s*", text.lower())
    if match is None or match[1].count(".") > 1 or match[1] == ".":
        return None
    power = " kmgtp".index(match[2] or " ")
    return float(match[1]) * (1024 if match[3] else 1000) ** power


def plain_integer(value: object) -> object:
    """One of NumPy's integers as Python's own, which can be saved as JSON; anything else as it is."""
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def share(part: float, whole: float) -> str:
    """`part` of `whole` as a percentage: `12.5 %`; a dash if `whole` is zero."""
    return f"{100 * part / whole:.1f} %" if whole and math.isfinite(part / whole) else "-"


def change(before: float, after: float) -> str:
    """The relative change in percent with its sign: `+12.5 %`, `=` where nothing changed, `new` from nothing."""
    if before == after:
        return "="
    return f"{100 * (after - before) / before:+.1f} %" if before else "new"


def count(number: int, singular: str, many: str = "") -> str:
    """A number and its noun: `1 device`, `1,024 devices`."""
    return f"{number:,} {singular if number == 1 else many or singular + 's'}"


def _digits(value: float) -> float:
    """`value` as it prints with three digits, so that 999.96 counts as 1000."""
    return float(f"{value:.3g}")


def _three(value: float) -> str:
    """Three significant digits, without an exponent: 1.23, 12.3, 123, 1020."""
    integer_digits = len(str(int(abs(_digits(value)))))
    return f"{value:.{max(0, 3 - integer_digits)}f}"
