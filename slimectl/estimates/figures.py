"""Estimated quantities with their formulas, and their text form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Figure:
    """One line of a plan.

    >>> Figure("weights", 2 * 10**9, "bytes", "2 bytes x 1,000,000,000").text
    '1.86 GiB'
    """

    name: str
    value: float
    unit: str
    formula: str

    @property
    def text(self) -> str:
        """The value with its unit, as text."""
        match self.unit:
            case "bytes":
                return sized(self.value)
            case "parameters":
                return parameters(self.value)
            case "FLOP":
                return f"{counted(self.value)}FLOP"
        return f"{counted(self.value)} {self.unit}".rstrip()


def sized(count: float) -> str:
    """Format bytes with three digits.

    >>> sized(512), sized(3 * 2**20), sized(1.5 * 2**40)
    ('512 B', '3.00 MiB', '1.50 TiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1000:
            return f"{count:.{2 if count < 10 else 1 if count < 100 else 0}f} {unit}"
    return f"{count / 1024:.2f} TiB"


def parameters(count: float) -> str:
    """Format a number of parameters with three digits; B is 10^9.

    >>> parameters(886_272), parameters(596_049_920), parameters(1_720_574_976), parameters(1_026_408_209_408)
    ('886 k', '596 M', '1.72 B', '1.03 T')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count / 1000:.3g} k"


def counted(count: float) -> str:
    """Format a number: in full up to a million, then with three digits.

    >>> counted(8192), counted(596_049_920), counted(4.2e15), counted(0.25)
    ('8,192', '596 M', '4.2 P', '0.25')
    """
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:,.0f}" if count == int(count) or count >= 100 else f"{count:.3g}"


def total(name: str, figures: Iterable[Figure], suffix: str = "") -> Figure:
    """Sum several figures in bytes; the formula has their names."""
    figures = list(figures)
    formula = " + ".join(figure.name for figure in figures) + suffix
    return Figure(name, sum(figure.value for figure in figures), "bytes", formula)
