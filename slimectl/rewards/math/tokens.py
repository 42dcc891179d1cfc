"""Splits a written expression into tokens. Other text is refused, not skipped."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal, NamedTuple

MAX_CHARACTERS = 400
MAX_DIGITS = 60
MAX_EXPONENT = 300


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTIONS = word_set(
    """sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot arcsec arccsc asin acos atan
    ln log lg exp max min gcd lcm sqrt floor ceil abs"""
)
_CONSTANTS = {"pi": "pi", "infty": "infinity", "infinity": "infinity", "inf": "infinity"}
_OPERATORS = {"plus": "+", "minus": "-", "times": "*", "over": "/", "cdot": "*", "div": "/", "ast": "*", "star": "*"}
_POSTFIXES = {"factorial": "!", "squared": "^2", "cubed": "^3"}
SCALES = {
    "hundred": Fraction(100), "thousand": Fraction(1000), "million": Fraction(10**6), "billion": Fraction(10**9),
    "trillion": Fraction(10**12), "dozen": Fraction(12), "halves": Fraction(1, 2), "thirds": Fraction(1, 3),
    "quarters": Fraction(1, 4), "fourths": Fraction(1, 4), "fifths": Fraction(1, 5), "sixths": Fraction(1, 6),
    "sevenths": Fraction(1, 7), "eighths": Fraction(1, 8), "ninths": Fraction(1, 9), "tenths": Fraction(1, 10),
    "hundredths": Fraction(1, 100), "thousandths": Fraction(1, 1000),
}  # fmt: skip
"""Words that multiply the number before them."""

GREEK = word_set(
    """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma tau
    upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar"""
)
BIG = word_set("sum prod int iint iiint oint lim")
"""Operators whose body follows them."""

_ACCENTS = r"vec|hat|bar|overline|overrightarrow|widehat|tilde|boldsymbol|mathcal|mathbb|angle|triangle|measuredangle"
_NO_PRODUCTS = word_set("or is if of to it no")
_STRUCTURE = word_set("frac sqrt binom lfloor rfloor lceil rceil degree bmod mod prime mathrm operatorname from") | BIG

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+|\.(?![\d.]))?|\.\d+"
_TOKEN = re.compile(
    rf"""(?P<blank>\s*)(?:
    (?P<repeating>\d*\.\d*(?:\\(?:overline|bar|dot)\s*(?:\{{\d+\}}|\d)|\(\d+\)))
    |(?P<number>(?:{_NUMBER})(?:[eE][-+]?\d{{1,9}}(?![\w.]))?)(?!\.)
    |\\(?P<accent>{_ACCENTS})(?![A-Za-z])\s*(?P<accented>\{{[\\A-Za-z0-9' ]{{1,20}}\}}
        |[A-Za-z]{{1,4}}(?![A-Za-z])|\\[a-z]+)
    |\\(?:operatorname|mathrm)\s*\{{\s*(?P<operator>[a-z]+)\s*\}}
    |\\(?P<reference>matrix|where)\{{(?P<referent>[\da-zA-Z ]+)\}}
    |\\(?P<command>[A-Za-z]+)
    |(?P<word>[A-Za-z]+)
    |(?P<sign>\*\*|[-+*/^_!()\[\]{{}}|',:])
    )""",
    re.VERBOSE,
)

Kind = Literal["matrix", "where", "number", "symbol", "constant", "function", "scale", "command", "sign", "end"]


class UnreadableError(Exception):
    """The text is not an expression that the parser supports."""


class Token(NamedTuple):
    """One token: its canonical spelling `text`, the `value` of a number, and whether a blank comes before it."""

    kind: Kind
    text: str
    is_spaced: bool = False
    value: Fraction | None = None


def tokenize(text: str) -> list[Token]:
    """Split into tokens, the last of kind "end". Raises UnreadableError for anything that is not understood."""
    if len(text) > MAX_CHARACTERS:
        raise UnreadableError
    tokens: list[Token] = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise UnreadableError
        tokens += _tokens_of(match, tokens)
        at = match.end()
    return [*tokens, Token("end", "")]


def _tokens_of(match: re.Match[str], before: list[Token]) -> list[Token]:
    is_spaced = match["blank"] != ""
    if match["repeating"] or match["number"]:
        text = match["repeating"] or match["number"]
        mantissa, _, exponent = (match["number"] or "").lower().partition("e")
        if exponent and abs(int(exponent)) > MAX_EXPONENT:  # 10^exponent, which has its own limits
            first, *others, _ = tokenize(f"{{{mantissa}*10^{{{exponent}}}}}")
            return [first._replace(is_spaced=is_spaced), *others]
        return [Token("number", text, is_spaced, _repeating(text) if match["repeating"] else _decimal(text))]
    if match["accent"]:
        inner = re.sub(r"[{}\s]", "", match["accented"])
        is_plain = match["accent"] == "boldsymbol" or (match["accent"] == "overline" and len(inner) > 1)
        return [Token("symbol", inner if is_plain else f"{match['accent']} {inner}", is_spaced)]
    if match["reference"]:
        kind: Kind = "matrix" if match["reference"] == "matrix" else "where"
        return [Token(kind, match["referent"], is_spaced)]
    if name := match["command"] or match["operator"]:
        return _command(name, is_spaced)
    if match["word"]:
        after_number = is_spaced and bool(before) and before[-1].kind == "number"
        return _word(match["word"], is_spaced, after_number)
    return [Token("sign", {"**": "^"}.get(match["sign"], match["sign"]), is_spaced)]


def _command(name: str, is_spaced: bool) -> list[Token]:
    if name in FUNCTIONS - {"sqrt"}:
        return [Token("function", name, is_spaced)]
    if name in _CONSTANTS:
        return [Token("constant", _CONSTANTS[name], is_spaced)]
    if name in _OPERATORS:
        return [Token("sign", _OPERATORS[name], is_spaced)]
    if name in ("e", "i"):
        return [Token("constant", name, is_spaced)]
    if name in GREEK:
        return [Token("symbol", name, is_spaced)]
    if name in _STRUCTURE:
        return [Token("command", name, is_spaced)]
    raise UnreadableError


def _word(word: str, is_spaced: bool, after_number: bool) -> list[Token]:
    """Tokenize a function, a constant, an operator, or the product of a few letters, but no other words."""
    lower = word.lower()
    if word in FUNCTIONS:
        return [Token("function", word, is_spaced)]
    if lower in _CONSTANTS:
        return [Token("constant", _CONSTANTS[lower], is_spaced)]
    if lower in _OPERATORS:
        return [Token("sign", _OPERATORS[lower], is_spaced)]
    if lower in _POSTFIXES:
        sign, power = _POSTFIXES[lower][0], _POSTFIXES[lower][1:]
        return [Token("sign", sign), *([Token("number", power, False, Fraction(power))] if power else [])]
    if lower in SCALES or lower.removesuffix("s") in SCALES:
        return [Token("scale", lower if lower in SCALES else lower.removesuffix("s"), is_spaced)]
    if len(word) > 1 and word.isupper():
        return [Token("symbol", word, is_spaced)]  # a segment, an angle, a digit string: AB is not A times B
    function = next(
        (name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "ln", "log") if word.startswith(name)), ""
    )
    if function and 0 < len(word) - len(function) <= 2:
        return [Token("function", function, is_spaced), *_letters(word[len(function) :], False)]
    is_word = len(word) > 3 or (len(word) == 3 and (after_number or word.istitle()))
    if lower in _NO_PRODUCTS or (is_word and (list(word) != sorted(word) or len(word) > 4)):
        raise UnreadableError
    return _letters(word, is_spaced)


def _letters(word: str, is_spaced: bool) -> list[Token]:
    kinds: dict[str, Kind] = {"e": "constant", "i": "constant"}
    return [Token(kinds.get(letter, "symbol"), letter, is_spaced and not at) for at, letter in enumerate(word)]


def _decimal(text: str) -> Fraction:
    mantissa, _, exponent = text.replace(",", "").lower().partition("e")
    if len(mantissa) > MAX_DIGITS or abs(int(exponent or "0")) > MAX_EXPONENT:
        raise UnreadableError
    return Fraction(mantissa.rstrip(".")) * Fraction(10) ** int(exponent or "0")


def _repeating(text: str) -> Fraction:
    r"""The value of 0.1\overline{6}, 0.\bar{6}, 0.\dot{6} or 0.1(6)."""
    match = re.fullmatch(r"(\d*)\.(\d*)\D*(\d+)\D*", text)
    if match is None or len(text) > MAX_DIGITS:
        raise UnreadableError
    integer, fixed, period = match.groups()
    scale = 10 ** len(fixed)
    return Fraction(int(integer + fixed or "0"), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
