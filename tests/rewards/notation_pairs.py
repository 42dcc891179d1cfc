"""Pairs of answers in the notation that models write: units, matrices, sums, Unicode, Markdown, times.

Values come from Python's integers and fractions; a pair is right by construction, or differs by one stated change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from random import Random

from formula_pairs import differential, script, scripts, space
from math_pairs import Pair, fraction, matrix, spelled

UNITS = (
    r"\text{{ {}}}",
    r"\text{{{}}}",
    r"\,\mathrm{{{}}}",
    r"~\mathrm{{{}}}",
    r"\ \text{{{}}}",
    " {}",
    r"\mbox{{ {}}}",
    r"\;\textrm{{{}}}",
)
RAISED = str.maketrans("0123456789-+n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ")
LOWERED = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
GREEK = dict(
    zip(
        "αβγδεζηθκλμνξρστφχψωΓΔΘΛΦΨΩ",
        re.findall(
            r"\\\w+",
            r"\alpha\beta\gamma\delta\epsilon\zeta\eta\theta\kappa\lambda\mu\nu\xi\rho\sigma\tau\phi\chi\psi\omega"
            r"\Gamma\Delta\Theta\Lambda\Phi\Psi\Omega",
        ),
        strict=True,
    )
)


def number(random: Random) -> tuple[str, Fraction]:
    """A number as it is written before a unit, and its value."""
    whole = random.randint(1000, 9_999_999)
    comma = random.choice((",", "{,}", r"\,", ",\\!", "\u202f", "\u2009"))
    value = fraction(random)
    power = random.randint(2, 30)
    return random.choice(
        (
            (f"{whole:,}".replace(",", comma), Fraction(whole)),
            (f"{whole:,}.25".replace(",", comma), Fraction(4 * whole + 1, 4)),
            (str(random.randint(2, 999)), None),
            (spelled(value, random).strip(), value),
            (rf"{power}.5\times 10^{{{power}}}", Fraction(2 * power + 1, 2) * 10**power),
            (rf"\frac{{{value.numerator}}}{{{value.denominator}}}", value),
        )
    )


def valued(random: Random) -> tuple[str, Fraction]:
    text, value = number(random)
    return text, Fraction(text) if value is None else value


def plain(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def units(random: Random) -> Iterator[Pair]:
    text, value = valued(random)
    unit = random.choice(
        ("cm", "km", "miles", "kg", "hours", "mph", "km/h", "feet", "dollars", "people", "degrees", "square feet", "kJ",
         "meters per second", "kPa", "mol", "m/s", "cubic centimeters", "gallons", "mL")
    )  # fmt: skip
    yield plain(value), text + random.choice(UNITS).format(unit), True
    yield plain(value + 1), text + random.choice(UNITS).format(unit), False
    base, power = random.choice(("m", "cm", "km", "ft", "in", "mm")), random.choice("23")
    raised = random.choice((f"^{power}", f"^{{{power}}}", power.translate(RAISED)))
    blank, name = random.choice((r"\ ", r"\,", "~", " ")), random.choice((r"\text", r"\mathrm"))
    forms = (
        rf"{blank}{name}{{{base}}}{raised}",
        rf"{blank}{name}{{{base}{raised}}}",
        f" {base}{raised}",
        rf"{name}{{ {base}}}{raised}",
    )
    yield plain(value), text + random.choice(forms), True
    yield plain(value**2), text + random.choice(forms), value in (0, 1)
    compound = random.choice(
        (
            rf"{blank}\mathrm{{kg}}\cdot\mathrm{{m}}^2",
            rf"{blank}\text{{N}}\cdot\text{{m}}",
            rf"{blank}\frac{{\text{{m}}}}{{\text{{s}}^2}}",
            rf"{blank}\mathrm{{m\,s^{{-2}}}}",
            rf"{blank}\mathrm{{J}}\,\mathrm{{mol}}^{{-1}}\,\mathrm{{K}}^{{-1}}",
            rf"{blank}\mathrm{{W/m^2}}",
            rf"{blank}\mu\text{{m}}",
            rf"{blank}\Omega",
            rf"{blank}\text{{ V}}",
            rf"{blank}\text{{km}}/\text{{h}}",
        )
    )
    yield plain(value), text + compound, True
    yield plain(value + Fraction(1, 2)), text + compound, False
    count = random.randint(2, 9)
    yield str(count), f"{count}" + random.choice((" thousand", r"\text{ million}", " dozen", r"\text{ pairs}")), False
    yield str(count), f"{count}" + random.choice(("m", "s^2", "mg", "K", r"\text{A}", " of 7", " half")), False


def money_and_degrees(random: Random) -> Iterator[Pair]:
    whole = random.randint(1000, 99_999)
    grouped = random.choice((str(whole), f"{whole:,}", f"{whole:,}".replace(",", "{,}")))
    forms = (
        r"\${}", "${}", "€{}", "{}€", "{} €", "£{}", "¥{}", "₹{}", r"\pounds {}", "US${}", r"\text{{USD }}{}", "USD {}",
        "{} EUR", r"{}\text{{ euros}}", "Rs. {}", r"\text{{\$}}{}", r"{}\$", r"\${}\text{{ per month}}", "{} dollars",
        r"x = \${}",
    )  # fmt: skip
    answer = random.choice(forms).format(grouped)
    yield str(whole), answer, True
    yield str(whole * 1000), answer, False
    yield str(whole), rf"\${grouped}" + random.choice((r"\text{ million}", " thousand", "k")), False
    value = fraction(random)
    signs = ("°", "º", r"^\circ", r"^{\circ}", "°C", "℃", r"^\circ\mathrm{C}", r"\text{ degrees}", "°F", r"\,°C", "%",
             r"\%", r"\text{\%}", "％", r"\,\%", r"\text{ percent}", " %")  # fmt: skip
    yield plain(value), spelled(value, random).strip() + random.choice(signs), True
    yield plain(value + 1), spelled(value, random).strip() + random.choice(signs), False


def thousands(random: Random) -> Iterator[Pair]:
    first, second = random.randint(1, 99) * 1000, random.randint(1000, 999_999)
    small = random.randint(2, 99)
    opening, closing = random.choice(("()", "[]", (r"\{", r"\}"), ("", "")))
    bare = f"{opening}{first}, {small}{closing}"
    yield bare, f"{opening}{first:,}, {small}{closing}", True
    yield bare, f"{opening}{first:,},{small}{closing}", True
    yield f"{opening}{first}, {second}{closing}", f"{opening}{first:,}, {second:,}{closing}", True
    yield f"{opening}{first}, {second + 1}{closing}", f"{opening}{first:,}, {second:,}{closing}", False
    yield bare, f"{opening}{first // 1000}, {small}{closing}", False
    yield f"x = {first}, y = {second}", f"x = {first:,}, y = {second:,}", True
    yield f"x = {first}, y = {second}", f"x = {second:,}, y = {first:,}", first == second
    third = random.randint(100, 999)
    yield f"({small}, {third})", f"({small},{third})", True
    yield f"({small}, \\frac{{{2 * third}}}{{2}})", f"({small},{third})", True
    yield str(small * 1000 + third), f"({small},{third})", False
    yield str(second), random.choice(("x = {}", "{}.", r"\text{{{}}}", "**{}**", "{} cm")).format(f"{second:,}"), True
    yield (
        str(second),
        random.choice(("{}", "x = {}", "{} km", r"{}\text{{ km}}")).format(f"{second:,}".replace(",", " ")),
        True,
    )
    yield f"{small}{third}", f"{small},{third},5", False
    yield str(first), random.choice((f"{first // 1000},0", f"{first // 1000},00", f"{first // 1000}, 000")), False


def rational(random: Random, height: int, width: int) -> list[list[Fraction]]:
    return [[fraction(random) for _ in range(width)] for _ in range(height)]


def product(first: list[list[Fraction]], second: list[list[Fraction]]) -> list[list[Fraction]]:
    return [
        [sum(map(Fraction.__mul__, row, column), Fraction(0)) for column in zip(*second, strict=True)] for row in first
    ]


def combined(first: list[list[Fraction]], second: list[list[Fraction]], a: int, b: int) -> list[list[Fraction]]:
    """The sum of a times the first matrix and b times the second."""
    return [[a * x + b * y for x, y in zip(*rows, strict=True)] for rows in zip(first, second, strict=True)]


def matrix_sums(random: Random) -> Iterator[Pair]:
    height, width = random.choice(((2, 2), (2, 1), (1, 3), (3, 1), (2, 3)))
    first, second = rational(random, height, width), rational(random, height, width)
    a, b = random.randint(2, 9), random.randint(2, 9)

    def written(rows: list[list[Fraction]]) -> str:
        return matrix(random, rows, random.choice(("pmatrix", "bmatrix")))

    one, two = written(first), written(second)
    dot = random.choice(("", r"\cdot ", r"\times ", r"\,"))
    forms: tuple[tuple[str, int, int], ...] = (
        (f"{one}+{two}", 1, 1),
        (f"{one} - {two}", 1, -1),
        (f"{a}{dot}{one}+{two}", a, 1),
        (f"{a}{one} - {b}{dot}{two}", a, -b),
        (rf"-{one}+{b}{two}", -1, b),
        (rf"{a}\left({one}+{two}\right)", a, a),
        (rf"{one}\cdot {a} + {two}", a, 1),
        (rf"x = {one}+{b}{two}", 1, b),
    )
    answer, *weights = random.choice(forms)
    right = combined(first, second, *weights)
    yield written(right), answer, True
    wrong = [list(row) for row in right]
    wrong[-1][0] += random.choice((1, Fraction(1, 2)))
    yield written(wrong), answer, False
    yield written(right), f"{answer} = {written(right)}", True
    yield written(wrong), f"{answer} = {written(wrong)}", False
    yield written(combined(first, second, 0, 1)), f"{one}+{two}", False
    third = [[entry / a for entry in row] for row in first]
    yield written(third), random.choice((f"{one}/{a}", rf"\frac{{1}}{{{a}}}{one}", rf"\frac{{{one}}}{{{a}}}")), True
    yield (
        rf"{one}, {two}",
        random.choice((rf"{two}, {one}", rf"{two}\text{{ and }}{one}", rf"\left\{{{two}, {one}\right\}}")),
        True,
    )
    yield rf"{one}, {two}", rf"{one}, {written(wrong)}", wrong == second


def matrix_products(random: Random) -> Iterator[Pair]:
    first, second = rational(random, 2, 2), rational(random, 2, 2)
    column = rational(random, 2, 1)

    def written(rows: list[list[Fraction]]) -> str:
        return matrix(random, rows, random.choice(("pmatrix", "bmatrix")))

    dot = random.choice(("", r"\cdot ", r"\times ", " "))
    one, two = written(first), written(second)
    right, turned = product(first, second), product(second, first)
    yield written(right), f"{one}{dot}{two}", True
    yield written(turned), f"{one}{dot}{two}", right == turned
    yield written(product(first, column)), f"{one}{dot}{written(column)}", True
    yield written(product(first, first)), one + random.choice(("^2", "^{2}", one)), True
    entrywise = [[entry**2 for entry in row] for row in first]
    yield written(entrywise), f"{one}^2", entrywise == product(first, first)
    transposed = [list(row) for row in zip(*first, strict=True)]
    yield written(transposed), one + random.choice(("^T", "^{T}", r"^\top", r"^{\mathsf{T}}", r"^{\intercal}")), True
    yield written(first), f"{one}^T", transposed == first
    (a, b), (c, d) = first
    determinant = a * d - b * c
    cells = matrix(random, first, "vmatrix")
    yield (
        plain(determinant),
        random.choice((cells, rf"\det{one}", rf"\left|{one}\right|", rf"\det\left({one}\right)")),
        True,
    )
    yield plain(determinant + 1), cells, False
    yield one, cells, False
    if determinant:
        inverse = [[d / determinant, -b / determinant], [-c / determinant, a / determinant]]
        yield written(inverse), f"{one}^{{-1}}", True
        yield (
            written(inverse),
            rf"\frac{{1}}{{{determinant}}}{written([[d, -b], [-c, a]])}"
            if determinant.denominator == 1
            else written(inverse),
            True,
        )
        yield written(first), f"{one}^{{-1}}", inverse == first


def vectors(random: Random) -> Iterator[Pair]:
    size = random.choice((2, 3))
    first, second = ([random.randint(-9, 9) for _ in range(size)] for _ in "12")
    a, b = random.randint(2, 9), random.randint(2, 9)
    left, right = random.choice(("()", (r"\langle ", r"\rangle "), (r"\left(", r"\right)")))

    def written(values: list[int] | list[str]) -> str:
        return f"{left}{', '.join(map(str, values))}{right}"

    one, two = written(first), written(second)
    total = [a * x + b * y for x, y in zip(first, second, strict=True)]
    yield written(total), f"{a}{one} + {b}{two}", True
    yield written([total[0] + 1, *total[1:]]), f"{a}{one} + {b}{two}", False
    yield written([x - y for x, y in zip(first, second, strict=True)]), f"{one} - {two}", True
    line = written([f"{x} + {y}t" for x, y in zip(first, second, strict=True)])
    yield line, random.choice((f"{one} + t{two}", f"{one}+{two}t", rf"\mathbf{{r}} = {one}+t{two}")), True
    yield line, f"{two} + t{one}", first == second
    column = matrix(random, [[Fraction(value)] for value in first], "pmatrix")
    other = matrix(random, [[Fraction(value)] for value in second], "pmatrix")
    yield column, f"{one}^T", True
    entries = r" \\ ".join(f"{x}+{y}t" for x, y in zip(first, second, strict=True))
    yield rf"{column}+t{other}", rf"\begin{{bmatrix}} {entries} \end{{bmatrix}}", True
    yield rf"{column}+t{other}", rf"{other}+t{column}", first == second
    yield rf"{column}+t{other}", rf"{column} + {other} t", True


def big(sign: str, index: str, random: Random) -> str:
    """A sum or product over the index with its bounds."""
    limits = scripts(random.choice((f"{index}=1", f"{index} = 1")), "n", random)
    return sign + random.choice(("", r"\limits")) + limits + random.choice((" ", r"\,", ""))


def joined(factors: list[str], random: Random) -> str:
    return random.choice((" ", r" \cdot ", r"\,")).join(random.sample(factors, len(factors)))


def factors_of_sums(random: Random) -> Iterator[Pair]:
    sign, other = random.sample((r"\sum", r"\prod"), 2)
    index, renamed = random.sample("ijkm", 2)
    table = [
        "a_{}", "b_{{{}}}", "F_{{n-{}}}", "F_{{n-{}-1}}", "{}^2", "x^{{{}}}", r"\frac{{1}}{{{}}}", r"\binom{{n}}{{{}}}",
        "({}+1)", r"\sin({}x)", "{}!", "2^{{{}}}", r"\lambda_{{{}}}", "f({})",
    ]  # fmt: skip
    forms = random.sample(table, 3)
    factors, again = ([form.format(name) for form in forms] for name in (index, renamed))
    label = big(sign, index, random) + joined(factors, random)
    yield label, big(sign, index, random) + joined(factors, random), True
    yield label, big(sign, renamed, random) + joined(again, random), True
    yield label, rf"S = {big(sign, index, random)}{joined(factors, random)}", True
    yield label, big(other, index, random) + joined(factors, random), False
    yield label, big(sign, index, random) + joined(factors[:2], random), False
    yield label, big(sign, index, random).replace("=1", "=0").replace("= 1", "= 0") + joined(factors, random), False
    yield label, big(sign, renamed, random) + joined([*again[:2], factors[2]], random), False
    yield f"3{label}", rf"3 \cdot {label}", True
    count = random.randint(2, 9)
    total = big(r"\sum", index, random)
    yield (
        rf"{total} {count} \cdot {joined(factors[:2], random)}",
        rf"{count}{total} {joined(factors[:2], random)}",
        True,
    )
    times = big(r"\prod", index, random)
    yield f"{times} {count}a_{index}", f"{count}{times} a_{index}", False
    yield rf"{total} {index} a_{index}", rf"{index}{total} a_{index}", False
    yield rf"{total} (a_{index}+b_{index})", rf"{total} (b_{index} + a_{index})", True
    yield rf"{total} (a_{index}+b_{index})", rf"{total} a_{index} + {total} b_{index}", True
    yield rf"{total} a_{index}b_{index}", rf"{total} a_{index} \cdot {total} b_{index}", False
    end = random.randint(3, 12)
    yield str(sum(at**2 for at in range(1, end + 1))), rf"\sum_{{{index}=1}}^{{{end}}} {index}^2", True
    yield str(math.factorial(end)), rf"\prod_{{{index}=1}}^{{{end}}} {index}", True
    yield str(sum(at**2 for at in range(1, end + 1)) + 1), rf"\sum_{{{index}=1}}^{{{end}}} {index}^2", False


def factors_of_integrals(random: Random) -> Iterator[Pair]:
    variable, renamed = random.sample("xtyu", 2)
    forms = random.sample(("{}^2", "f({})", r"e^{{{}}}", r"\sin({})", r"\sqrt{{{}}}", "g({})", "({}+1)"), 3)
    low, high = random.sample(("0", "1", "a", "b", r"\pi", r"\infty", "-1"), 2)

    def integral(name: str, start: str, end: str, factors: list[str]) -> str:
        sign = random.choice((r"\int", r"\displaystyle\int", r"\int\limits"))
        return (
            f"{sign}{scripts(start, end, random)} {joined(factors, random)}{space(random)}{differential(name, random)}"
        )

    factors, again = ([form.format(name) for form in forms] for name in (variable, renamed))
    label = integral(variable, low, high, factors)
    yield label, integral(variable, low, high, factors), True
    yield label, integral(renamed, low, high, again), True
    yield label, integral(variable, high, low, factors), False
    yield label, integral(renamed, low, high, factors), False
    yield label, integral(variable, low, high, factors[1:]), False
    yield label, integral(variable, low, high, [*factors[1:], "2"]), False
    body = joined(factors, random)
    yield rf"\int {body}\,d{variable} + C", rf"C + \int {joined(factors, random)}\, d{variable}", True
    yield rf"\int {body}\,d{variable}", rf"\int {joined(again, random)}\, d{renamed}", False
    target = script(random.choice(("0", "a", r"\infty")), random)
    yield (
        rf"\lim_{{{variable}\to {target}}} {body}",
        rf"\lim_{{{variable} \to {target}}} {joined(factors, random)}",
        True,
    )
    yield rf"\lim_{{{variable}\to {target}}} {body}", rf"\lim_{{{variable} \to 5}} {joined(factors, random)}", False
    yield (
        r"\int_0^1\int_0^2 xy^2\,dx\,dy",
        random.choice((r"\int_0^1 \int_0^2 y^2x\,dx\,dy", r"\int_{0}^{1}\int_{0}^{2} y^2 x dx dy")),
        True,
    )
    yield r"\int_0^1\int_0^2 xy^2\,dx\,dy", r"\int_0^2\int_0^1 xy^2\,dx\,dy", False


def greek(random: Random) -> Iterator[Pair]:
    (first, one), (second, two) = random.sample(list(GREEK.items()), 2)
    count, place = random.randint(2, 9), random.randint(1, 12)
    yield one, first, True
    yield one, second, False
    yield f"{one} + {count}{two}", f"{count}{second}+{first}", True
    yield f"{one} - {two}", f"{second} − {first}", False
    yield rf"\frac{{{one}}}{{{two}}}", f"{first}/{second}", True
    yield f"{count} {one}^2 {two}", f"{count}{second}{first}²", True
    yield f"{one}_{{{place}}}", f"{first}{str(place).translate(LOWERED)}", True
    yield f"{one}_{{{place}}}", f"{first}{str(place + 1).translate(LOWERED)}", False
    yield str(count), f"{first} = {count}", True
    yield f"{one}_1 = {count}, {one}_2 = {place}", f"{first}₁={count}, {first}₂={place}", True
    yield rf"\sin {one}", f"sin {first}", True
    latin = random.choice("abvxy")
    yield latin, first, False


def characters(random: Random) -> Iterator[Pair]:
    value, power, exponent = random.randint(2, 999), random.randint(2, 40), random.randint(2, 30)
    minus = random.choice("−–‐‑‒—﹣－⁻")
    yield f"-{value}", f"{minus}{value}", True
    yield str(value), f"{minus}{value}", False
    yield f"x-{value}", f"x {random.choice('−–－')} {value}", True
    digits = random.choice(("０１２３４５６７８９", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗"))
    written = str(value).translate(str.maketrans("0123456789", digits))
    yield str(value), written, True
    yield str(value + 1), written, False
    yield f"x^{{{power}}}", "x" + str(power).translate(RAISED), True
    yield f"x^{{{power + 1}}}", "x" + str(power).translate(RAISED), False
    yield f"10^{{-{exponent}}}", "10" + f"-{exponent}".translate(RAISED), True
    yield str(value * 10**exponent), f"{value}×10{str(exponent).translate(RAISED)}", True
    blank = random.choice("\u2009\u202f\xa0\u2007")
    yield str(value * 1000 + 7), f"{value * 1000 + 7:,}".replace(",", blank), True
    unseen = random.choice("\u200b\u200e\u2060\ufeff")
    yield str(value), random.choice((f"{unseen}{value}", f"{value}{unseen}")), True
    top, bottom, sign = random.choice(((1, 8, "⅛"), (5, 8, "⅝"), (1, 6, "⅙"), (2, 5, "⅖"), (3, 4, "¾"), (2, 3, "⅔")))
    yield f"{top}/{bottom}", sign, True
    yield str(value + Fraction(top, bottom)), f"{value}{sign}", True
    yield f"{value}{top}/{bottom}", f"{value}{sign}", False
    end = random.choice("。．｡")
    yield str(value), f"{value}{end}", True
    yield f"({value}, {power})", f"（{value}，{power}）", True
    yield f"{value}, {power}", f"{value}、{power}", value != power
    yield f"x < {value}", f"x＜{value}", True
    less, least = random.choice((("⩽", r"\le"), ("≦", r"\le"), ("⩾", r"\ge")))
    yield f"x {least} {value}", f"x {less} {value}", True
    yield f"x < {value}", f"x {less} {value}", False
    word = random.choice(("José", "naïve", "Zoë", "Erdős", "Gödel"))
    apart = word.replace("é", "e\u0301").replace("ï", "i\u0308").replace("ë", "e\u0308").replace("ő", "o\u030b")
    yield word, apart.replace("ö", "o\u0308"), True
    yield word, word.translate(str.maketrans("éïëőö", "eieoo")), False


def emphasis(random: Random) -> Iterator[Pair]:
    value = fraction(random)
    text = random.choice((spelled(value, random).strip(), f"{spelled(value, random).strip()} cm"))
    marks = (
        "**{}**", "*{}*", "__{}__", "_{}_", "`{}`", "***{}***", r"\boldsymbol{{{}}}", r"{{\bf {}}}", r"\bm{{{}}}",
        r"\underline{{{}}}", r"\color{{red}}{{{}}}", r"\textcolor{{blue}}{{{}}}", r"{{\color{{red}}{}}}", r"\Large {}",
        r"\mathbf{{{}}}", r"\textbf{{{}}}", "**{}**.", "“{}”", '"{}"', "「{}」", "‘{}’", "<b>{}</b>",
        r"{}\hspace{{1em}}",
        r"\texttt{{{}}}", "{{{}}}", r"\underline{{\mathbf{{{}}}}}", r"{}\tag{{1}}", "**${}$**",
    )  # fmt: skip
    answer = random.choice(marks).format(text)
    yield plain(value), answer, True
    yield plain(value + 1), answer, False
    yield plain(-value), answer, False
    first, second = random.randint(2, 99), random.randint(2, 9)
    yield (
        f"({first}, {second})",
        random.choice(("**({}, {})**", r"\mathbf{{({}, {})}}", "*({}, {})*")).format(first, second),
        True,
    )
    yield f"({first}, {second})", f"**({second}, {first})**", first == second
    word = random.choice(("yes", "Tuesday", "increasing", "odd"))
    yield word, random.choice(("**{}**", "“{}”", r"\textbf{{{}}}", "**{}.**", "_{}_")).format(word.title()), True
    yield word, f"**not {word}**", False
    yield str(first**second), f"{first}**{second}", True
    yield str(first * second), f"**{first}**{second}", False


def times(random: Random) -> Iterator[Pair]:
    hour, minute = random.randint(1, 11), random.choice((5, 15, 30, 45, 59))
    clock, late = f"{hour}:{minute:02}", f"{hour + 12}:{minute:02}"
    after = random.choice(
        (" PM", "PM", " p.m.", " pm", "pm", r"\text{ PM}", r"\,\text{p.m.}", r" \mathrm{PM}", " P.M.")
    )
    before = random.choice((" AM", "AM", " a.m.", "am", r"\text{ AM}", r"\ \text{a.m.}", " A.M."))
    pointed = random.choice((clock, clock.replace(":", "{:}"), f"0{clock}" if hour < 10 else clock))
    yield f"{clock} PM", pointed + after, True
    yield clock, pointed + after, True
    yield late, pointed + after, True
    yield f"{clock} PM", late, True
    yield f"{clock} AM", pointed + before, True
    yield f"{clock} AM", pointed + after, False
    yield late, pointed + before, False
    yield late, clock, False
    yield f"{hour}:{minute - 1:02} PM", pointed + after, False
    yield f"{hour} PM", f"{hour}:00{after}", True
    yield str(Fraction(hour, minute)), pointed + after, False
    yield random.choice(("12:00 PM", "12:00 p.m.")), "noon", True
    yield random.choice(("12:00 AM", "12:00 p.m.")), "12:30 PM", False


def factorials(random: Random) -> Iterator[Pair]:
    name, count = random.choice("nmkx"), random.randint(2, 12)
    gamma = random.choice((r"\Gamma", "Γ"))
    yield f"{name}!", rf"{gamma}({name}+1)", True
    yield f"{name}!", rf"{gamma}({name})", False
    yield rf"{gamma}({name})", f"({name}-1)!", True
    yield rf"\Gamma({name}+{count})", rf"({name}+{count - 1})\Gamma({name}+{count - 1})", True
    yield rf"\Gamma({name}+{count})", rf"\Gamma({name})+{count}", False
    yield rf"{gamma}({count})", str(math.factorial(count - 1)), True
    yield rf"{gamma}({count})", str(math.factorial(count)), False
    yield rf"{gamma}\left(\frac{{1}}{{2}}\right)", r"\sqrt{\pi}", True
    below = random.choice("jrs")
    yield (
        rf"\binom{{{name}}}{{{below}}}",
        rf"\frac{{{gamma}({name}+1)}}{{{gamma}({below}+1){gamma}({name}-{below}+1)}}",
        True,
    )
    yield rf"\binom{{{name}}}{{{below}}}", rf"\frac{{{name}!}}{{{below}!({name}-{below})!}}", True
    yield rf"\binom{{{name}}}{{{below}}}", rf"\frac{{{name}!}}{{{below}!}}", False
    large = random.randint(500, 1100)
    yield str(large * (large - 1)), rf"\frac{{{large}!}}{{{large - 2}!}}", True
    yield f"{large}!", rf"{large}\cdot {large - 1}!", True
    yield f"{large}!", rf"{large - 1}!", False
    yield str(math.comb(large * 10, 2)), rf"\binom{{{large * 10}}}{{2}}", True


def huge(random: Random) -> Iterator[Pair]:
    power, digits = random.randint(310, 1500), random.randint(11, 99)
    yield f"1e{power}", rf"10^{{{power}}}", True
    yield f"{digits}e{power}", rf"{digits} \times 10^{{{power}}}", True
    yield f"{digits}e{power}", rf"{digits / 10}\cdot 10^{{{power + 1}}}", True
    yield f"{digits}e{power}", rf"{digits / 10}\cdot 10^{{{power}}}", False
    yield f"1e-{power}", rf"10^{{-{power}}}", True
    yield f"1e{power}", f"1e{power + 1}", False
    far = random.randint(20_000, 900_000)
    yield f"1e{far}", rf"10^{{{far}}}", True
    yield rf"2^{{{2 * far}}}", rf"4^{{{far}}}", True
    yield rf"2^{{{2 * far}}}", rf"4^{{{far + 1}}}", False
    yield rf"2^{{{2 * far}}}", rf"2^{{{2 * far}}}+1", False
    yield rf"3^{{{far}}} - 1", rf"3 \cdot 3^{{{far - 1}}} - 1", True
    yield r"7^{7^7}", f"7^{{{7**7}}}", True
    yield r"7^{7^7}", f"7^{{{7**7 + random.randint(1, 9)}}}", False
    year = random.randint(1990, 2040)
    yield rf"{year}^{{{year + 1}}}", rf"{year} \cdot {year}^{{{year}}}", True
    yield rf"{year}^{{{year + 1}}}", rf"{year + 1}^{{{year}}}", False


FAMILIES: tuple[Callable[[Random], Iterator[Pair]], ...] = (
    units,
    money_and_degrees,
    thousands,
    matrix_sums,
    matrix_products,
    vectors,
    factors_of_sums,
    factors_of_integrals,
    greek,
    characters,
    emphasis,
    times,
    factorials,
    huge,
)


def drawn(family: Callable[[Random], Iterator[Pair]], count: int, seed: int) -> list[Pair]:
    """At least as many different pairs of a family; the same for the same seed."""
    random = Random(seed)
    pairs: dict[Pair, None] = {}
    for _ in range(1000):
        pairs |= dict.fromkeys(family(random))
        if len(pairs) >= count:
            break
    return list(pairs)
