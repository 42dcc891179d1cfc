"""Removes and compares units and counted objects after a number. Words that change the number do not count."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

from slimectl.rewards.math.tokens import word_set

_LETTERS = "m|s|g|h|l|L"
_CAPITALS = "A|V|W|J|N|C|K|F|T|H|S"
"""Units in roman type after a blank. Elsewhere they are variables."""

_AMBIGUOUS = r"in|mi|mg|ms|ml|mL|mV|mA|[mnp][sF]|[nu]m|\\mu ?[smgALF]|Pa|\\Omega|dB|[kMGT]B"
_WORDS = (
    r"mm|cm|dm|km|inch(?:es)?|f(?:oo|ee)?t|y(?:ar)?ds?|yrs?|miles?|kg|lbs?|oz|ounces?|(?:kilo|milli)?grams?|pounds?|tons?"
    r"|sec(?:ond)?s?|min(?:ute)?s?|h(?:ou)?rs?|days?|weeks?|months?|years?|(?:milli)?lit(?:er|re)s?|gallons?|quarts?"
    r"|(?:centi|milli|kilo)?met(?:er|re)s?|deg(?:ree)?s?|rad(?:ian)?s?|dollars?|cents?|euros?|units?|percent(?:age)?|pct|mph"
    r"|cups?|pints?|rpm|points?|kph|watts?|joules?|newtons?|volts?|amps?|acres?|hectares?|kmh|[kMG]?Hz|[hkMG]Pa|[kMG]?eV"
    r"|kcal|atm|torr|mmHg|k?Wh|[kM]J|[kMG]W|kV|kN|[mk]?mol|moles?|kelvin|ohms?|[kM](?:\\Omega|\\ohm)|o'clock|USD|EUR|GBP|JPY|CNY|RMB|INR|CAD|AUD|CHF|ppm|sq|fps"
)
POWER = r"(?:\s*\^\s*(?:\d|\{\s*[-+]?\d\s*\}|-\d))?"
_NAME = rf"(?:{_WORDS}|{_AMBIGUOUS}|{_LETTERS})"
_WORD = rf"{_NAME}(?![A-Za-z])(?:\s+(?:squared|cubed)|{POWER})"
_NEXT = rf"(?:\s*(?:/|per|an?|\*|\\cdot|\\times)\s*\(?{_WORD}\)?|\s+{_NAME}\s*\^\s*(?:-\d|\{{\s*-\d\s*\}})){{0,3}}"
"""Further units. Next to each other they need a negative power, as in m s^{-1}: m s may be two variables."""

UNIT = rf"(?:(?:square|cubic|sq\.?|cu\.?)\s+)?{_WORD}{_NEXT}\.?"
_ROMAN_WORD = rf"(?:(?:{_NAME}|{_CAPITALS})(?![A-Za-z])(?:\s+(?:squared|cubed)|[23](?!\d)|{POWER}))"
_ROMAN_UNIT = re.compile(
    rf"{_ROMAN_WORD}(?:\s*(?:/|per(?![a-z])|\*|\\cdot|\\times|\s)\s*\(?{_ROMAN_WORD}\)?){{0,4}}\.?"
)
"""In roman type adjacent letters are a product of units: N m."""

_ROMAN = r"\\(?:text(?:rm|bf|it|sf|up)?|mathrm|mathit|mathsf|mbox|operatorname)"
_TEXT_ARGUMENT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|mathrm|mathbf|mathit|mathsf|mathtt|mbox|hbox|emph)\s*\{([^{}]*)\}"
)
_ROMAN_TEXT = rf"{_ROMAN}\s*\{{[^{{}}]*(?:\{{[^{{}}]*\}}[^{{}}]*)?\}}{POWER}"
_ROMAN_PRODUCT = rf"(?:\\(?:mu|Omega|ohm)(?![A-Za-z])\s*|{_ROMAN_TEXT}\s*|\\cdot\s*|\\times\s*|[/*]\s*)"
_PIECE = rf"(?:{_ROMAN_PRODUCT}|\\frac\s*\{{\s*{_ROMAN_PRODUCT}{{1,3}}\}}\s*\{{\s*{_ROMAN_PRODUCT}{{1,3}}\}}{POWER}\s*)"
_ROMAN_AT_END = re.compile(
    rf"(?<=[\w}})\]!|'])(\s*)((?:{_ROMAN_TEXT}|\\frac|\\mu(?![A-Za-z])|\\(?:Omega|ohm)(?![A-Za-z])).*)$"
)
_PIECES = re.compile(rf"{_PIECE}{{1,8}}")
_TEXT_AT_END = re.compile(rf"(?<=[\w}})\]!|'])\s*{_ROMAN}\s*\{{([^{{}}]*)\}}{POWER}\s*$")
_PLAIN_NUMBER = (
    r"[-+]?(?:\d+\s+)?[\d.,/]+(?:[eE][-+]?\d+)?(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d+))?"
)
_IS_NUMBER = re.compile(r"(?:[-+\d.,/\s{}^*]|\\(?:frac|times|cdot)(?![A-Za-z]))+")
_PLAIN_UNIT = re.compile(rf"^({_PLAIN_NUMBER})\s+{UNIT}\s*$")
_SPACED_UNIT = re.compile(rf"(?:(?<=[\d}})])|(?<=\\pi))\s+(?:{_WORDS}|in(?=\s*\^))(?![A-Za-z]){POWER}{_NEXT}\s*$")
_TIGHT_UNIT = re.compile(rf"(?<=\d)(?:{_WORDS})(?![A-Za-z]){POWER}{_NEXT}\s*$")
"""5cm is a length, but 5m may be five times m, and 2mg may be a force."""

_CURRENCY_AT_START = re.compile(
    rf"^([-+]?)\s*(?:{_ROMAN}\s*\{{\s*)?(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CAD|AUD|CHF|Rs)\.?\s*\}}?\s*(?=[-+]?[\d.\\])"
)
_WORDS_AT_END = re.compile(r"^(.*[\d})\]])\s+((?:/\s?)?[A-Za-z][A-Za-z .'-]*)$", re.DOTALL)
_UNIT_PHRASE = re.compile(
    rf"{UNIT}(?:\s+(?:tall|long|wide|high|deep|old|away|each|in total|per\s+[a-z]+|an?\s+[a-z]+|/\s*[a-z]+))?"
)
_RATE = re.compile(r"(?:/|per|an?)\s+[a-z]{3,}")
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


Unit = tuple[Fraction, tuple[tuple[str, int], ...]]
"""Size in base units, and the power of each base unit: 5 km/h and 5 m/s differ, and 5 mL is 5 cm^3."""

_PREFIXES = {"kilo": Fraction(1000), "centi": Fraction(1, 100), "milli": Fraction(1, 1000), "deci": Fraction(1, 10),
             "micro": Fraction(1, 10**6), "nano": Fraction(1, 10**9), "mega": Fraction(10**6), "hecto": Fraction(100),
             "k": Fraction(1000), "c": Fraction(1, 100), "m": Fraction(1, 1000), "d": Fraction(1, 10),
             r"\mu": Fraction(1, 10**6), "n": Fraction(1, 10**9), "p": Fraction(1, 10**12), "M": Fraction(10**6),
             "G": Fraction(10**9), "h": Fraction(100)}  # fmt: skip
_SI = """m meter metre = 1 m | g gram = 1/1000 kg | s sec second = 1 s | A amp ampere = 1 A | K kelvin = 1 K
    | mol mole = 1 mol | l L liter litre = 1/1000 m3 | N newton = 1 kg m s-2 | J joule = 1 kg m2 s-2
    | W watt = 1 kg m2 s-3 | Pa pascal = 1 kg m-1 s-2 | Hz hertz = 1 s-1 | C coulomb = 1 A s | V volt = 1 kg m2 s-3 A-1
    | F farad = 1 kg-1 m-2 s4 A2
    | ohm \\Omega \\ohm = 1 kg m2 s-3 A-2 | T tesla = 1 kg s-2 A-1 | H henry = 1 kg m2 s-2 A-2
    | Wh = 3600 kg m2 s-2"""
_OTHER = """min minute = 60 s | h hr hour = 3600 s | day = 86400 s | week = 604800 s | month = 2629800 s
    | year yr = 31557600 s | in inch inche = 127/5000 m | ft foot feet = 381/1250 m | yd yard = 1143/1250 m
    | mi mile = 201168/125 m | mph = 1397/3125 m s-1 | kph kmh = 5/18 m s-1 | lb pound = 45359237/100000000 kg
    | oz ounce = 45359237/1600000000 kg | cent = 1/100 USD | dollar USD = 1 USD | euro EUR = 1 EUR | GBP = 1 GBP
    | deg degree = 1 deg | rad radian = 1 rad"""


def _table(text: str) -> dict[str, Unit]:
    units: dict[str, Unit] = {}
    for line in text.split("|"):
        names, _, value = line.partition("=")
        size, *bases = value.split()
        powers = tuple(
            sorted((base.rstrip("-0123456789"), int(re.sub(r"^[A-Za-z]+", "", base) or 1)) for base in bases)
        )
        units |= dict.fromkeys(names.split(), (Fraction(size), powers))
    return units


_KNOWN = _table(_SI) | _table(_OTHER)
_PREFIXED = frozenset(_table(_SI).values())
_FACTOR = re.compile(
    r"\s*(?P<over>/)?(?:\\cdot|\\times|\*)?\s*\(?(?:(?P<before>squ|cub|sq|cu)(?:are|ic)?\.?\s)?\s*"
    r"(?P<name>\\mu\s?[A-Za-z]+|\\[A-Za-z]+|[A-Za-z]+)(?:\s*\^\s*\{?(?P<power>-?\d)\}?|\s(?P<after>squ|cub)(?:ar)?ed)?\)?\s*"
)


def without_unit(text: str) -> str:
    r"""Return the text without the unit or the counted objects at its end, with \text{} unwrapped.

    >>> [without_unit(text) for text in (r"5\text{ cm}", "72 red apples", "2 million", "1 1/2 cups")]
    ['5', '72', '2 million', '1 1/2']

    Other words stay, so that the text is another number or not a number.
    """
    text = _CURRENCY_AT_START.sub(r"\1", text)
    if any(command in text for command in (r"\text", r"\m", r"\o", r"\Omega")):
        text = _without_roman_unit(text)
    text = re.sub(r"\s+", " ", unwrap_text(text)).strip()
    text = _PLAIN_UNIT.sub(r"\1", text)
    text = _TIGHT_UNIT.sub("", _SPACED_UNIT.sub("", text))
    match = _SCALED.match(text) or _WORDS_AT_END.match(text)
    if match and len(match[2]) > 2 and is_unit(match[2], singular=_is_one(match[1])):
        text = match[1]
    return text.strip()


def _without_roman_unit(text: str) -> str:
    r"""The text without the units in roman type at its end: \text{ m/s}^2, \mathrm{kg}\cdot\mathrm{m}."""
    match = _ROMAN_AT_END.search(text)
    if match and _PIECES.fullmatch(match[2]):
        phrase = _flat(match[2])
        is_spaced = bool(match[1]) or re.match(r"\\[a-z]+\s*\{[ ~]", match[2]) is not None
        is_unit_name = is_spaced or len(phrase) > 1 or phrase in _LETTERS  # 5\text{A} may be any name
        if phrase == r"\Omega":
            is_unit_name = is_spaced and _IS_NUMBER.fullmatch(text[: match.start()]) is not None
        if is_unit_name and _ROMAN_UNIT.fullmatch(phrase):
            return text[: match.start()]
    for _ in range(2):
        match = _TEXT_AT_END.search(text)
        if match and (is_unit(match[1], singular=_is_one(text[: match.start()])) or not match[1].strip()):
            text = text[: match.start()]
    return text


def _flat(pieces: str) -> str:
    """Units as plain text: fractions as quotients, without the commands of fonts."""
    pieces = re.sub(r"\^\s*\{\s*([-+]?\d)\s*\}", r"^\1", pieces)
    pieces = re.sub(rf"{_ROMAN}\s*\{{([^{{}}]*)\}}", lambda text: f" {text[1].strip()}", pieces)
    pieces = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1 / \2 ", pieces)
    return re.sub(r"[\s~]+", " ", pieces).strip()


def unit_behind(written: str, number: str) -> Unit | None:
    r"""Return the unit that `without_unit` removed from a text to leave a number, or None if it is unknown.

    >>> [unit_behind(text, "5") for text in (r"5\text{ km}/\text{h}", "5 kilometers per hour", "5 apples")]
    [(Fraction(5, 18), (('m', 1), ('s', -1))), (Fraction(5, 18), (('m', 1), ('s', -1))), None]
    """
    if written == number:
        return None
    tail = written[len(number) :] if written.startswith(number) else ""
    phrase = re.sub(r"\bper\b", "/", _flat(tail).rstrip(". "))
    size, powers, sign, at = Fraction(1), Counter[str](), 1, 0
    for factor in _FACTOR.finditer(phrase):
        unit = _unit_named(factor["name"])
        if factor.start() != at or unit is None or (sign < 0 and not factor["over"]):  # m/s m: is the last m below?
            return None
        sign = -1 if factor["over"] else 1
        power = int(
            factor["power"] or {"squ": 2, "sq": 2, "cub": 3, "cu": 3}.get(factor["before"] or factor["after"], 1)
        )
        size *= unit[0] ** (sign * power)
        powers.update({name: sign * power * count for name, count in unit[1]})
        at = factor.end()
    return (
        (size, tuple(sorted((name, count) for name, count in powers.items() if count)))
        if 0 < at == len(phrase)
        else None
    )


def _unit_named(name: str) -> Unit | None:
    """The unit of a name, with a prefix of SI (km, kilometers) and in the plural."""
    for spelled in (name, name.removesuffix("s")):
        if unit := _KNOWN.get(spelled):
            return unit
        for prefix, size in _PREFIXES.items():
            if (
                spelled.startswith(prefix)
                and (unit := _KNOWN.get(spelled[len(prefix) :].strip()))
                and unit in _PREFIXED
            ):
                return (size * unit[0], unit[1])
    return None


def unwrap_text(text: str) -> str:
    r"""Replace \text{} and similar commands by their content. Words keep a blank on both sides.

    >>> unwrap_text(r"2\text{million}"), unwrap_text(r"2\mathbf{v}")
    ('2 million ', '2v')
    """
    return re.sub(_TEXT_ARGUMENT, lambda m: f" {m[1]} " if len(m[1].strip()) > 1 else m[1], text)


def is_unit(phrase: str, *, singular: bool = False) -> bool:
    """Whether the words are a known unit or counted objects, in the plural unless `singular`.

    >>> [is_unit(phrase) for phrase in ("m/s^2", "red apples", "years old", "minus pi", "million dollars")]
    [True, True, True, False, False]
    """
    phrase = re.sub(r"\s+", " ", phrase.replace("~", " ")).strip()
    if _UNIT_PHRASE.fullmatch(phrase):
        return True
    if _RATE.fullmatch(phrase):
        return not _NO_OBJECT & set(phrase.split())
    if singular:
        phrase = re.sub(r"^of (?:an?|the|one) ", "", phrase)
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
