"""Pairs of answers, made by families: one value in two spellings, or two values that look alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from random import Random

from formula_pairs import formulas

Pair = tuple[str, str, bool]
"""(label, answer, whether they are the same in value)."""

PLACES = ("x", "y", "z")


def spelled(value: Fraction, random: Random) -> str:
    """A number in one of its spellings."""
    top, bottom = value.numerator, value.denominator
    if bottom == 1:
        return random.choice((str(top), f"{top}.0", rf"\frac{{{3 * top}}}{{3}}", f" {top} "))
    factor = random.randint(2, 9)
    forms = [rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", rf"\dfrac{{{top * factor}}}{{{bottom * factor}}}"]
    if top < 0:
        forms.append(rf"-\frac{{{-top}}}{{{bottom}}}")
    if 10**6 % bottom == 0:
        forms += [f"{float(value):.6f}".rstrip("0"), rf"\text{{{float(value)}}}"]
    return random.choice(forms)


def fraction(random: Random) -> Fraction:
    return Fraction(random.choice((-1, 1, 1)) * random.randint(1, 60), random.choice((1, 2, 3, 4, 5, 7, 8, 12)))


def fractions(random: Random) -> Iterator[Pair]:
    value = fraction(random)
    yield spelled(value, random), spelled(value, random), True
    yield spelled(value, random), spelled(value + random.choice((-1, 1, Fraction(1, 10))), random), False
    yield spelled(value, random), spelled(-value, random), False


def mixed_numbers(random: Random) -> Iterator[Pair]:
    whole, bottom = random.randint(1, 30), random.randint(2, 9)
    top = random.randint(1, bottom - 1)
    sign, unit = random.choice(("", "-")), random.choice(("", "", " cups", r"\text{ cm}"))
    value = Fraction(whole * bottom + top, bottom) * (-1 if sign else 1)
    form = random.choice(("{} {}/{}", r"{}\ {}/{}", r"{}\frac{{{}}}{{{}}}", r"{} \frac{{{}}}{{{}}}", r"{}~{}/{}"))
    mixed = sign + form.format(whole, top, bottom) + unit
    yield spelled(value, random), mixed, True
    yield f"{sign}{whole}{top}/{bottom}", mixed, False
    yield spelled(value * whole, random), mixed, value * whole == value
    yield f"{whole}{top}", f"{whole} {top}", False


def words_after_numbers(random: Random) -> Iterator[Pair]:
    count = random.randint(2, 9)
    words = {"million": 10**6, "dozen": 12, "thousand": 1000, "hundred": 100, "billion": 10**9}
    word, scale = random.choice(list(words.items()))
    answer = random.choice((f"{count} {word}", rf"{count}\text{{ {word}}}", f"{count} {word} dollars"))
    yield str(count * scale), answer, True
    yield str(count), answer, False
    yield str(math.factorial(count)), f"{count} factorial", True
    yield f"{count}!", f"{count} factorial", True
    yield str(count), f"{count} factorial", count < 3
    name = random.choice("xyz")
    yield rf"{count}-\pi", f"{count} minus pi", True
    yield (
        str(count),
        random.choice((f"{count} minus pi", f"{count} over {name}", f"{count} half", f"{count} choose 2")),
        False,
    )
    yield rf"\frac{{{count}}}{{{name}}}", f"{count} over {name}", True
    yield spelled(Fraction(count, 2), random), f"{count} halves", True


def units(random: Random) -> Iterator[Pair]:
    value = fraction(random)
    unit = random.choice(
        (
            " cm",
            r"\text{ cm}",
            r"\text{ m/s}^2",
            r"\%",
            r"^\circ",
            " square feet",
            r"\mbox{ inches}",
            " hours",
            r"\text{ eggs}",
            " red marbles",
            r"~\mathrm{kg}",
            r" \text{ dollars}",
            " years old",
        )
    )
    yield spelled(value, random), spelled(value, random) + unit, True
    yield spelled(value + 1, random), spelled(value, random) + unit, False
    number = random.randint(1000, 9_999_999)
    grouped = f"{number:,}".replace(",", random.choice((",", "{,}", r"\,", ",\\!")))
    yield str(number), random.choice(("", r"\$")) + grouped, True
    yield str(number + 1000), grouped, False


def decimals_without_end(random: Random) -> Iterator[Pair]:
    fixed, period = random.choice(("", "1", "04")), str(random.randint(1, 98))
    if set(period) == {"9"}:
        period = "1"
    scale = 10 ** len(fixed)
    value = Fraction(int(fixed or "0"), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    form = random.choice((r"\overline{{{}}}", r"\bar{{{}}}", "({})"))
    answer = f"0.{fixed}" + form.format(period)
    yield rf"\frac{{{value.numerator}}}{{{value.denominator}}}", answer, True
    yield f"{value.numerator}/{value.denominator}", f"0.{fixed}{period * 6}", False
    yield f"0.{fixed}{period}", answer, False
    number = random.randint(2, 99)
    yield str(number), f"{number}" + random.choice(("...", r"\ldots", r"\dots", "…")), False


def roots(random: Random) -> Iterator[Pair]:
    factor, inside = random.randint(2, 9), random.choice((2, 3, 5, 6, 7, 10, 13))
    label = rf"{factor}\sqrt{{{inside}}}"
    forms = (
        f"{factor}√{inside}",
        rf"\sqrt{{{factor**2 * inside}}}",
        rf"{factor}\cdot {inside}^{{1/2}}",
        f"{factor}*sqrt({inside})",
        rf"\frac{{{factor * inside}}}{{\sqrt{{{inside}}}}}",
        f"√{factor**2 * inside}",
    )
    yield label, random.choice(forms), True
    yield label, random.choice((f"{factor + 1}√{inside}", rf"\sqrt{{{factor * inside}}}", f"{factor}{inside}")), False
    yield label, f"{factor * math.sqrt(inside):.6f}", False
    yield (
        rf"\sqrt[3]{{{inside}}}",
        random.choice((rf"{inside}^{{1/3}}", rf"\sqrt[3]{{{inside}}}", rf"\frac{{\sqrt[3]{{{8 * inside}}}}}{{2}}")),
        True,
    )
    yield rf"\sqrt[3]{{{inside}}}", rf"\sqrt{{{inside}}}", False


def logarithms(random: Random) -> Iterator[Pair]:
    number, base, power = random.randint(2, 20), random.randint(2, 7), random.randint(2, 6)
    yield (
        rf"\ln {number}",
        random.choice((rf"\log_e {number}", rf"\log_{{e}}({number})", f"ln({number})", rf"2\ln\sqrt{{{number}}}")),
        True,
    )
    yield rf"\ln {number}", random.choice((rf"\log_2 {number}", rf"\ln {number + 1}", rf"\log {number}")), False
    yield str(power), rf"\log_{{{base}}} {base**power}", True
    yield str(power + 1), rf"\log_{{{base}}} {base**power}", False


def powers_of_ten(random: Random) -> Iterator[Pair]:
    digits, exponent = random.randint(101, 999), random.randint(3, 30)
    label = str(digits * 10 ** (exponent - 2))
    forms = ("{}e{}", "{}E{}", r"{} \times 10^{{{}}}", r"{}\cdot 10^{{{}}}", "{}*10^{}")
    yield label, random.choice(forms).format(digits / 100, exponent), True
    yield label, random.choice(forms).format(digits / 100, exponent + 1), False


def lists(random: Random) -> Iterator[Pair]:
    values = list({fraction(random) for _ in range(random.randint(2, 4))})
    values = values if len(values) > 1 else [*values, values[0] + 1]
    label = ", ".join(spelled(value, random) for value in values)
    mixed = random.sample(values, len(values))
    *first, last = [spelled(value, random) for value in mixed]
    joint = random.choice(
        (r", \text{ and } ", r" \text{ or } ", ", and ", " or ", ", ", r",\ ", "; ", r" \text{ and } ")
    )
    answer = ", ".join(first) + joint + last
    yield label, random.choice((answer, rf"\{{{', '.join([*first, last])}\}}", f"x = {answer}")), True
    yield label, ", ".join(first) + joint + spelled(mixed[-1] + Fraction(1, 3), random), False
    yield label, ", ".join([*first, last, spelled(max(values) + 1, random)]), False
    middle, step = random.randint(1, 9), random.randint(1, 9)
    yield f"{middle + step}, {middle - step}", rf"{middle} \pm {step}", True


def points(random: Random) -> Iterator[Pair]:
    values = [fraction(random) for _ in range(random.choice((2, 3)))]
    names = PLACES[: len(values)]
    label = "(" + ", ".join(spelled(value, random) for value in values) + ")"
    texts = [spelled(value, random) for value in values]
    named = ", ".join(f"{name} = {text}" for name, text in zip(names, texts, strict=True))
    plain = ",".join(texts)
    answer = random.choice(
        (rf"\left( {plain} \right)", f"({','.join(names)})=({plain})", named, rf"\langle {plain} \rangle")
    )
    yield label, answer, True
    turned = texts[::-1]
    yield label, f"({','.join(names)})=({','.join(turned)})", values == values[::-1]
    yield label, f"({','.join([*texts[:-1], spelled(values[-1] + 1, random)])})", False
    yield label, random.choice((f"[{plain}]", rf"\{{{plain}\}}", plain)), False


def interval(random: Random, low: Fraction, high: Fraction, has: tuple[bool, bool]) -> str:
    """An interval in one of its spellings."""
    first, last = spelled(low, random).strip(), spelled(high, random).strip()
    less = [random.choice(("<=", r"\le ", r" \leq ", "≤") if closed else ("<", " < ", r" \lt ")) for closed in has]
    more = [random.choice((">=", r"\ge ", "≥") if closed else (">", r" \gt ")) for closed in has]
    plain = f"{'(['[has[0]]}{first}, {last}{')]'[has[1]]}"
    chain = f"{first}{less[0]}x{less[1]}{last}"
    spellings = (
        plain,
        rf"x \in {plain}",
        f"x ∈ {plain}",
        chain,
        rf"\{{x \mid {chain}\}}",
        f"{last}{more[1]}x{more[0]}{first}",
    )
    return random.choice(spellings)


def intervals(random: Random) -> Iterator[Pair]:
    low = fraction(random)
    high, has = low + random.randint(1, 900), (random.random() < 0.5, random.random() < 0.5)
    label = interval(random, low, high, has)
    yield label, interval(random, low, high, has), True
    yield label, interval(random, low, high, (not has[0], has[1])), False
    yield label, interval(random, low, high + 1, has), False


def half_lines(random: Random) -> Iterator[Pair]:
    low = random.randint(-20, 20)
    high, slope = low + random.randint(1, 20), random.randint(2, 5)
    yield (
        rf"[{low}, \infty)",
        random.choice((f"x>={low}", rf"x \geq {low}", rf"{low} \le x", f"{slope}x >= {slope * low}")),
        True,
    )
    yield rf"[{low}, \infty)", random.choice((f"x>{low}", rf"x \leq {low}", f"x>={high}")), False
    outside = rf"(-\infty, {low}) \cup ({high}, \infty)"
    spellings = (
        f"x<{low} or x>{high}",
        rf"x < {low} \text{{ or }} x > {high}",
        f"x > {high} or {low} > x",
        rf"({high}, \infty) \cup (-\infty, {low})",
        rf"x \in {outside}",
        rf"\mathbb{{R}} \setminus [{low}, {high}]",
    )
    yield outside, random.choice(spellings), True
    yield f"x<{low} or x>{high}", random.choice(spellings), True
    yield (
        outside,
        random.choice((f"{low}<x<{high}", rf"x \le {low} \text{{ or }} x > {high}", f"x<{low}", r"\mathbb{R}")),
        False,
    )
    yield (
        rf"x \ne {low}",
        random.choice(
            (rf"(-\infty,{low})\cup({low},\infty)", rf"\mathbb{{R}} \setminus \{{{low}\}}", rf"x \neq {low}")
        ),
        True,
    )


def named_sets(random: Random) -> Iterator[Pair]:
    reals = (
        r"\mathbb{R}",
        r"(-\infty,\infty)",
        r"(-\infty, +\infty)",
        "all real numbers",
        r"x \in \mathbb{R}",
        "ℝ",
        r"\text{all real numbers}",
    )
    nothing = (r"\emptyset", r"\varnothing", "∅", r"\{\}", r"\{ \}")
    yield random.choice(reals), random.choice(reals), True
    yield random.choice(nothing), random.choice(nothing), True
    yield random.choice(reals), random.choice(nothing), False
    yield random.choice(nothing), random.choice((r"\{\emptyset\}", r"\{0\}", "0", "(0,1)")), False


def matrix(random: Random, rows: list[list[Fraction]], environment: str) -> str:
    blank, end = random.choice(("", " ")), random.choice((r"\\", r"\\ ", " \\\\\n", r" \cr ", r"\\[4pt]"))
    cells = [[spelled(value, random).strip() for value in row] for row in rows]
    body = end.join(f"{blank}&{blank}".join(row) for row in cells)
    return rf"\begin{{{environment}}}{blank}{body}{blank}\end{{{environment}}}"


def matrices(random: Random) -> Iterator[Pair]:
    height, width = random.choice(((2, 2), (2, 1), (3, 1), (1, 3), (3, 3)))
    rows = [[fraction(random) for _ in range(width)] for _ in range(height)]
    label = matrix(random, rows, "pmatrix")
    prefix = random.choice(("", "", "A = ", "A=", r"\mathbf{v} = "))
    yield label, prefix + matrix(random, rows, random.choice(("pmatrix", "bmatrix"))), True
    other = [list(row) for row in rows]
    other[random.randrange(height)][random.randrange(width)] += 1
    yield label, prefix + matrix(random, other, "pmatrix"), False
    turned = [list(column) for column in zip(*rows, strict=True)]
    yield label, matrix(random, turned, "bmatrix"), turned == rows


def numerals(random: Random) -> Iterator[Pair]:
    base = random.randint(2, 9)
    digits = "1" + "".join(str(random.randrange(base)) for _ in range(random.randint(1, 5)))
    yield (
        f"{digits}_{base}",
        random.choice((f"{digits}_{{{base}}}", rf"{digits}_{{\text{{{base}}}}}", f"({digits})_{base}")),
        True,
    )
    yield f"{digits}_{base}", f"{digits}_{base % 9 + 1 if base < 9 else 8}", False
    yield digits, f"{digits}_{base}", False
    yield f"{digits}_{base}", digits[:-1] + f"{(int(digits[-1]) + 1) % base}_{base}", False


def ratios(random: Random) -> Iterator[Pair]:
    first, second, factor = random.randint(2, 30), random.randint(2, 9), random.randint(2, 5)
    names = random.choice(("V_1:V_2", "a : b", "AB:CD"))
    yield (
        f"{first}:{second}",
        random.choice(
            (
                f"{names}={first}:{second}",
                f"{first * factor}:{second * factor}" if second * factor < 10 else f"{first} : {second}",
            )
        ),
        True,
    )
    yield f"{first}:{second}", f"{first}:{second + 1}", False
    hour, minute = random.randint(1, 9), random.choice((10, 15, 20, 30, 45))
    yield str(Fraction(hour, minute)), f"{hour}:{minute}", False
    yield f"{hour}:{minute}", f"{hour + 1}:{minute}", False


def names(random: Random) -> Iterator[Pair]:
    value = fraction(random)
    number, other = spelled(value, random), spelled(value + 1, random)
    name = random.choice(
        ("x", "|AB|", "AB", r"\angle ABC", "S_{n}", "f(3)", "P(A)", r"\alpha", "x_1", r"\text{Area}", r"\overline{AB}")
    )
    yield number, f"{name} = {spelled(value, random)}", True
    yield number, f"{name} = {other}", False
    yield f"x = {number}", f"y = {number}", False
    first, second = random.randint(2, 40), random.randint(2, 40)
    yield str(first + second), f"{first} + {second} = {first + second}", True
    yield str(first + second), random.choice(("", "x = ")) + f"{first + second + 1} = {first + second}", False
    segment = "".join(random.sample("ABCDEFGH", 2))
    yield segment, segment[::-1], False
    yield segment, rf"\text{{{segment}}}", True


def polynomials(random: Random) -> Iterator[Pair]:
    a, b, c = random.randint(1, 9), random.randint(1, 9), random.randint(2, 9)
    x, y = random.choice(("xy", "ab", "nk", "pq"))
    yield (
        f"{x}^2+{a + b}{x}+{a * b}",
        random.choice((f"({x}+{a})({x}+{b})", f"{a * b} + {x}^{{2}} + {a + b} {x}", f"({x}+{b}) \\cdot ({x}+{a})")),
        True,
    )
    yield (
        f"{x}^2+{a + b}{x}+{a * b}",
        random.choice((f"({x}+{a})({x}-{b})", f"{x}^2+{a + b}{x}", f"{x}^2+{a + b + 1}{x}+{a * b}")),
        False,
    )
    yield (
        rf"\frac{{{x}}}{{{c}}}",
        random.choice((f"{x}/{c}", rf"\frac{{1}}{{{c}}}{x}", rf"\frac{{{x}^2}}{{{c}{x}}}", f"1/{c} {x}")),
        True,
    )
    yield rf"\frac{{{x}}}{{{c}}}", rf"\frac{{{c}}}{{{x}}}", False
    yield f"{c}{x}{y}", f"{c}{y}{x}", True
    yield f"{x}-{y}", f"{y}-{x}", False
    yield (
        f"{y}={a}{x}+{b}",
        random.choice((f"{a}{x}-{y}+{b}=0", f"{c}{y} = {a * c}{x} + {b * c}", f"{y} - {b} = {a}{x}")),
        True,
    )
    yield f"{y}={a}{x}+{b}", random.choice((f"{y}={a}{x}-{b}", f"{a}{x}+{y}+{b}=0", f"{x}={a}{y}+{b}")), False


def functions(random: Random) -> Iterator[Pair]:
    angle, value = random.choice(((30, "1/2"), (90, "1"), (45, r"\frac{\sqrt{2}}{2}"), (60, r"\frac{\sqrt3}{2}")))
    yield value, rf"\sin {angle}^\circ", True
    yield value, rf"\cos {angle}^\circ", angle == 45
    count = random.randint(2, 9)
    yield rf"\tan {count}x", rf"\frac{{\sin {count}x}}{{\cos({count}x)}}", True
    yield r"\sin^2 x", random.choice((r"1-\cos^2 x", r"(\sin x)^2", r"\sin x \sin x")), True
    yield r"\sin^2 x", random.choice((r"\sin x^2", r"\cos^2 x", r"\sin 2x")), False
    yield rf"e^{{{count}x}}", random.choice((rf"\exp({count}x)", rf"(e^x)^{count}", rf"e^{{{count - 1}x}} e^x")), True
    yield rf"e^{{{count}x}}", rf"{count}e^x", False
    yield rf"{count}\pi", random.choice((f"{count}π", f"{count}pi", rf"\pi \cdot {count}")), True
    yield rf"{count}\pi", f"{count * math.pi:.8f}", False


FAMILIES: tuple[Callable[[Random], Iterator[Pair]], ...] = (
    fractions,
    mixed_numbers,
    words_after_numbers,
    units,
    decimals_without_end,
    roots,
    logarithms,
    powers_of_ten,
    lists,
    points,
    intervals,
    half_lines,
    named_sets,
    matrices,
    numerals,
    ratios,
    names,
    polynomials,
    functions,
    formulas,
)


def pairs(count: int, seed: int) -> list[tuple[str, Pair]]:
    """At least as many different pairs, each with its family; the same for the same seed."""
    random = Random(seed)
    drawn: dict[tuple[str, Pair], None] = {}
    while len(drawn) < count:
        for family in FAMILIES:
            drawn |= dict.fromkeys((family.__name__, pair) for pair in family(random))
    return list(drawn)
