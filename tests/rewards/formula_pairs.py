"""Formulas without a value of their own (sums, limits, integrals, indices), each written in two ways of LaTeX."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

Pair = tuple[str, str, bool]


def script(content: str, random: Random) -> str:
    """A script with or without braces and blanks."""
    if len(content) == 1:
        return random.choice((content, f"{{{content}}}", f" {{ {content} }}"))
    return random.choice((f"{{{content}}}", f"{{ {content} }}"))


def scripts(below: str, above: str, random: Random) -> str:
    """A subscript and a superscript, in either order."""
    parts = [f"_{script(below, random)}", f"^{script(above, random)}"]
    random.shuffle(parts)
    return "".join(parts)


def space(random: Random) -> str:
    return random.choice((" ", r"\,", r" \; ", r"\ ", "~"))


def index(letter: str, number: str, random: Random) -> str:
    return f"{letter}_{script(number, random)}"


def differential(letter: str, random: Random) -> str:
    return random.choice((f"d{letter}", rf"\mathrm{{d}}{letter}", rf"\mathrm d{letter}", rf"\text{{d}}{letter}"))


def half(random: Random) -> str:
    return random.choice((r"\frac12", r"\frac{1}{2}", r"\dfrac{1}{2}", r"\tfrac 12", r"\frac1{2}"))


def integral(low: str, high: str, random: Random) -> str:
    sign = random.choice((r"\int", r"\int\limits", r"\displaystyle\int"))
    value = random.choice(("f(x)", r"f\left(x\right)", r"f \left( x \right)"))
    return f"{sign}{scripts(low, high, random)} {half(random)} {value}{space(random)}{differential('x', random)}"


def series(sign: str, start: str, end: str, random: Random) -> str:
    lower = random.choice((f"i={start}", f"i = {start}"))
    return sign + random.choice(("", r"\limits")) + scripts(lower, end, random) + " " + index("a", "i", random)


def limit(target: str, random: Random) -> str:
    arrow = random.choice((r"\to", r"\rightarrow", r"\longrightarrow"))
    name = random.choice((r"\lim", r"\lim\limits", r"\operatorname{lim}"))
    return f"{name}_{{x{random.choice((' ', ''))}{arrow} {target}}}{space(random)}g(x)"


def named(name: str, random: Random) -> str:
    return random.choice((rf"\operatorname{{{name}}}", rf"\mathrm{{{name}}}", rf"\text{{{name}}}"))


def absolute(letter: str, random: Random) -> str:
    return random.choice(
        (rf"\left|{letter}\right|", rf"\lvert {letter} \rvert ", f"|{letter}|", rf"\vert {letter}\vert ")
    )


def formulas(random: Random) -> Iterator[Pair]:
    """Equal formulas, and such that differ in a bound, an index, an exponent or a name."""
    low, high = random.sample(("0", "1", "2", "a", "b", r"\pi", r"\infty", "12", "-1"), 2)
    yield integral(low, high, random), integral(low, high, random), True
    yield integral(low, high, random), integral(high, low, random), False
    sign, other = random.sample((r"\sum", r"\prod", r"\bigcup", r"\max"), 2)
    start, end = random.choice("01"), random.choice(("n", "m", r"\infty", "n+1", "10"))
    yield series(sign, start, end, random), series(sign, start, end, random), True
    yield series(sign, start, end, random), series(other, start, end, random), False
    yield series(sign, "0", end, random), series(sign, "1", end, random), False
    target = random.choice(("0", "0^+", r"\infty", "a"))
    yield limit(target, random), limit(target, random), True
    yield limit(target, random), limit("1", random), False
    base, argument = random.sample("23579", 2)
    yield rf"\log_{script(base, random)} x", rf"\log_{script(base, random)}(x)", True
    yield rf"\log_{script(base, random)} x", rf"\log_{script(argument, random)} x", False
    digits = str(random.randint(10, 99))
    yield f"c_{script(digits, random)}", f"c_{{{digits}}}", True
    yield f"c_{{{digits}}}", rf"c_{script(digits[0], random)}\,{digits[1]}", False
    yield f"c^{{{digits}}}", rf"c^{script(digits[0], random)}\,{digits[1]}", False
    name, another = random.sample(("lcm", "Re", "rank", "tr", "Var", "deg"), 2)
    yield f"{named(name, random)}(A)", f"{named(name, random)}(A)", True
    yield f"{named(name, random)}(A)", f"{named(another, random)}(A)", False
    yield absolute("t", random) + index("k", "1", random), absolute("t", random) + index("k", "1", random), True
    prime = random.choice(("h'", r"h^{\prime}", r"h^\prime"))
    yield f"{prime}(t)", "h'(t)", True
    yield f"{prime}(t)", "h''(t)", False
    yield r"\binom{n}{k}", random.choice((r"{n \choose k}", r"\binom nk", r"\dbinom{n}{k}")), True
    yield r"\binom{n}{k}", random.choice((r"{k \choose n}", r"\frac nk")), False
