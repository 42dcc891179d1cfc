r"""Writes the mathematical characters of Unicode as LaTeX, and digits, letters and marks of other scripts as ASCII."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction


def _fraction(number: float) -> str:
    value = Fraction(number).limit_denominator(10)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "π": "pi", "ρ": "rho", "ς": "sigma",
    "σ": "sigma", "τ": "tau", "υ": "upsilon", "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma",
    "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Υ": "Upsilon", "Φ": "Phi",
    "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_COMMANDS = {
    "×": "times", "✕": "times", "·": "cdot", "⋅": "cdot", "∙": "cdot", "•": "cdot", "∗": "ast", "÷": "div",
    "∞": "infty", "∪": "cup", "∩": "cap", "≤": "le", "⩽": "le", "≦": "le", "≥": "ge", "⩾": "ge", "≧": "ge", "≠": "ne",
    "≈": "approx", "±": "pm", "∓": "mp", "√": "sqrt", "∈": "in", "∉": "notin", "∅": "emptyset", "∖": "setminus",
    "∑": "sum", "∏": "prod", "∫": "int", "∬": "iint", "∮": "oint", "∂": "partial", "∇": "nabla", "∠": "angle",
    "△": "triangle", "⊂": "subset", "⊆": "subseteq", "⊃": "supset", "⊇": "supseteq", "≡": "equiv", "≅": "cong",
    "∼": "sim", "∝": "propto", "∥": "parallel", "⊥": "perp", "→": "to", "⟶": "to", "⇒": "Rightarrow",
    "⇔": "Leftrightarrow", "∀": "forall", "∃": "exists", "¬": "neg", "∧": "wedge", "∨": "vee", "∘": "circ",
    "⌊": "lfloor", "⌋": "rfloor", "⌈": "lceil", "⌉": "rceil", "⊤": "top", "⊕": "oplus", "⊗": "otimes", "ħ": "hbar",
    "∆": "Delta",
}  # fmt: skip
_OTHERS = {
    "−": "-", "–": "-", "∶": ":", "⁄": "/", "∕": "/", "⟨": "(", "⟩": ")", "〈": "(", "〉": ")", "∣": "|", "′": "'",
    "’": "'", "‘": "'", "‚": "'", "‹": "'", "›": "'", "“": '"', "”": '"', "„": '"', "‟": '"', "«": '"', "»": '"',
    "「": '"', "」": '"', "『": '"', "』": '"', "、": ",", "،": ",", "٬": ",", "٫": ".", "‖": r"\|", "⋯": "...",
    "°": r"^\circ ", "\u2061": " ", "\u2062": " ", "\u2063": ",", "\u2064": "+",
}  # fmt: skip
_BEFORE = str.maketrans(
    {"°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "…": "...", "´": "'",
     "ℝ": r"\mathbb{R} ", "ℤ": r"\mathbb{Z} ", "ℕ": r"\mathbb{N} ", "ℚ": r"\mathbb{Q} ", "ℂ": r"\mathbb{C} ",
     "ℓ": r"\ell ", "㎟": " mm^2", "㎠": " cm^2", "㎡": " m^2", "㎢": " km^2", "㎤": " cm^3", "㎥": " m^3",
     "∬": r"\iint ", "″": "''"}
    | {sign: _fraction(unicodedata.numeric(sign)) for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
    | dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u2060\u2066\u2067\u2068\u2069\ufeff")
)  # fmt: skip
"""Characters whose meaning the compatible form (NFKC) would change, and invisible characters."""

_AFTER = str.maketrans({sign: f"\\{name} " for sign, name in (_GREEK | _COMMANDS).items()} | _OTHERS)
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₒₓₕₖₗₘₙₚₛₜᵢⱼᵣ", "0123456789+-=()aeoxhklmnpstijr", strict=True))
_SCRIPT = re.compile(
    rf"([{''.join(_RAISED)}]+)[⁄/]([₀-₉]+)|(?<![^\s=(,\[{{])⁻(?=\d)|([{''.join(_RAISED)}]+)|([{''.join(_LOWERED)}]+)"
)
_AREA = re.compile(r"(?<=[\dπ])\s?m([²³])(?=\W*$)")
"""Square and cubic metres. With these characters m is a unit, not a variable."""

_DASH = re.compile(r"(?<!\d)(?<!\d\s)[‐‑‒—―]|[‐‑‒—―](?!\s?\d)")
"""A dash that is a minus sign. Between two numbers it would mark a range."""


def latex(text: str) -> str:
    r"""Write Unicode's mathematics as LaTeX: scripts, Greek, signs, full-width and other digits, accents composed.

    >>> latex("−½x² + α₁₀ ≤ １２"), latex("5。")
    ('-\\frac{1}{2}x^2 + \\alpha _{10} \\le  12', '5.')
    """
    if text.isascii():
        return text
    text = _AREA.sub(r"\\text{ m}\1", text)
    text = _SCRIPT.sub(_script, text.translate(_BEFORE))
    text = _DASH.sub("-", unicodedata.normalize("NFKC", text)).translate(_AFTER)
    text = re.sub(r"[。।۔]+(\W*)$", r".\1", text)
    return re.sub(r"(?![0-9])\d", lambda digit: str(int(digit[0])), text)


def _script(match: re.Match[str]) -> str:
    above, below, raised, lowered = match.groups()
    if above:
        return rf"\frac{{{_plain(above, _RAISED)}}}{{{_plain(below, _LOWERED)}}}"
    if not raised and not lowered:
        return "-"  # the raised minus sign of school textbooks
    script = _plain(raised, _RAISED) if raised else _plain(lowered, _LOWERED)
    is_followed = match.string[match.end() : match.end() + 1].isalnum()
    return ("^" if raised else "_") + (f"{{{script}}}" if len(script) > 1 or is_followed else script)


def _plain(script: str, alphabet: dict[str, str]) -> str:
    return "".join(alphabet[character] for character in script)
