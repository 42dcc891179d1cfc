"""Units and counted objects after a number; words that change the number are none of them."""

from __future__ import annotations

import re

from slimectl.rewards.math.tokens import word_set

_LETTERS = "m|s|g|h|l|L"
_AMBIGUOUS = "in|mi|mg|ms|ml|mL"
_WORDS = (
    r"mm|cm|dm|km|inch(?:es)?|f(?:oo|ee)?t|y(?:ar)?ds?|miles?|kg|lbs?|oz|ounces?|(?:kilo|milli)?grams?|pounds?|tons?"
    r"|sec(?:ond)?s?|min(?:ute)?s?|h(?:ou)?rs?|days?|weeks?|months?|years?|(?:milli)?lit(?:er|re)s?|gallons?|quarts?"
    r"|(?:centi|milli|kilo)?met(?:er|re)s?|deg(?:ree)?s?|rad(?:ian)?s?|dollars?|cents?|USD|euros?|units?|percent(?:age)?|pct|mph|Hz"
    r"|cups?|pints?|rpm|points?|kph|watts?|joules?|newtons?|volts?|amps?|acres?|hectares?|kmh"
)
POWER = r"(?:\s*\^\s*(?:\d|\{-?\d\}))?"
_WORD = rf"(?:{_WORDS}|{_AMBIGUOUS}|{_LETTERS})(?![A-Za-z])(?:\s+(?:squared|cubed)|{POWER})"
UNIT = rf"(?:(?:square|cubic|sq\.?|cu\.?)\s+)?{_WORD}(?:\s*(?:/|per|a|an|\*|\\cdot)\s*{_WORD})?\.?"
_ROMAN = r"\\(?:text(?:rm|bf|it)?|mathrm|mbox)"
_TEXT_ARGUMENT = r"\\(?:text(?:bf|it|rm|sf|normal)?|mathrm|mathbf|mathit|mathsf|mbox|hbox|emph)\s*\{([^{}]*)\}"

_TEXT_AT_END = re.compile(rf"(?<=[\w}})\]!|'])\s*{_ROMAN}\s*\{{([^{{}}]*)\}}{POWER}\s*$")
_RATE_AT_END = re.compile(rf"(?<=\d)\s*\\frac\s*\{{\s*{_TEXT_ARGUMENT}\s*\}}\s*\{{\s*{_TEXT_ARGUMENT}\s*\}}{POWER}\s*$")
_PLAIN_NUMBER = r"[-+]?(?:\d+\s+)?[\d.,/]+(?:[eE][-+]?\d+)?"
_PLAIN_UNIT = re.compile(rf"^({_PLAIN_NUMBER})\s+{UNIT}\s*$")
_SPACED_UNIT = re.compile(rf"(?<=[\d}})])\s+(?:{_WORDS})(?![A-Za-z]){POWER}\s*$")
_TIGHT_UNIT = re.compile(rf"(?<=\d)(?:{_WORDS})(?![A-Za-z]){POWER}\s*$")
"""5cm; but 5m may be five times m, and 2mg a force."""

_WORDS_AT_END = re.compile(r"^(.*[\d})\]])\s+([A-Za-z][A-Za-z .'-]*)$", re.DOTALL)
_UNIT_PHRASE = re.compile(rf"{UNIT}(?:\s+(?:tall|long|wide|high|deep|old|away|each|per\s+[a-z]+|an?\s+[a-z]+))?")
_SCALED = re.compile(r"^(.*\d\s+(?:hundred|thousand|[mb]illion|trillion|dozen))\s+([A-Za-z][A-Za-z .'-]*)$", re.DOTALL)
_IRREGULAR = word_set("people children men women mice geese feet teeth sheep fish dice vertices")
_NO_OBJECT = word_set(
    """hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens score
    half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths
    ninth ninths tenth tenths hundredth hundredths thousandth thousandths factorial factorials minus plus over
    divided by less more than squared cubed square root roots mod modulo choose base and or not no power powers
    one ones two twos three threes four fours five fives six sixes seven sevens eight eights nine nines ten tens
    eleven twelve twenty thirty forty fifty zero scores gross lakh lakhs crore crores googol negative plus most least
    twice double triple to of with if is percent pairs pair times sin cos tan log ln exp sqrt pi infinity"""
)
"""Words that may make another number of the one before them."""


def without_unit(text: str) -> str:
    r"""The text without the unit or the counted objects at its end, and \text{} unwrapped.

    >>> [without_unit(text) for text in (r"5\text{ cm}", "72 red apples", "2 million", "1 1/2 cups")]
    ['5', '72', '2 million', '1 1/2']

    Words that are no unit stay, and with them the text is another number or none.
    """
    for _ in range(2):
        match = _TEXT_AT_END.search(text)
        if match and (is_unit(match[1], singular=_is_one(text[: match.start()])) or not match[1].strip()):
            text = text[: match.start()]
    match = _RATE_AT_END.search(text)
    if match and is_unit(match[1]) and is_unit(match[2], singular=True):
        text = text[: match.start()]
    text = re.sub(r"\s+", " ", unwrap_text(text)).strip()
    text = _PLAIN_UNIT.sub(r"\1", text)
    text = _TIGHT_UNIT.sub("", _SPACED_UNIT.sub("", text))
    match = _SCALED.match(text) or _WORDS_AT_END.match(text)
    if match and len(match[2]) > 2 and is_unit(match[2], singular=_is_one(match[1])):
        text = match[1]
    return text.strip()


def unwrap_text(text: str) -> str:
    r"""Replace \text{} and its like by their content; words keep a blank on both sides.

    >>> unwrap_text(r"2\text{million}"), unwrap_text(r"2\mathbf{v}")
    ('2 million ', '2v')
    """
    return re.sub(_TEXT_ARGUMENT, lambda m: f" {m[1]} " if len(m[1].strip()) > 1 else m[1], text)


def is_unit(phrase: str, *, singular: bool = False) -> bool:
    """Whether the words are a known unit or name counted objects, in the plural unless `singular`.

    >>> [is_unit(phrase) for phrase in ("m/s^2", "red apples", "years old", "minus pi", "million dollars")]
    [True, True, True, False, False]
    """
    phrase = re.sub(r"\s+", " ", phrase.replace("~", " ")).strip()
    if _UNIT_PHRASE.fullmatch(phrase):
        return True
    parts = phrase.rstrip(".").split(" ")
    if parts == ["times"]:
        return True
    if not all(re.fullmatch(r"[A-Za-z'-]{2,}|a", part) for part in parts) or _NO_OBJECT & set(
        re.split(r"[ -]", phrase.lower())
    ):
        return False
    return len(parts[-1]) > 2 and (singular or any(map(_is_plural, parts)))


def _is_plural(word: str) -> bool:
    word = word.lower()
    return word in _IRREGULAR or (len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")))


def _is_one(text: str) -> bool:
    """Whether the number is 1 or a plain fraction, which a noun in the singular may follow."""
    return re.fullmatch(r"\s*[-+]?(?:1|\d+/\d+|\\frac\s*\{?\d\}?\s*\{?\d+\}?)\s*", text) is not None
