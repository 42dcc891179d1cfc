"""Removes from LaTeX and plain text all that does not change an answer's value."""

from __future__ import annotations

import re

from slimectl.rewards.math.units import without_unit

_CHARACTERS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "θ": r"\theta ",
    "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "±": r"\pm ", "∓": r"\mp ", "²": "^2", "³": "^3", "⁴": "^4", "⁵": "^5", "\xa0": " ", "\u2009": " ", "\u202f": " ",
    "°": r"^\circ ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "∈": r"\in ", "∅": r"\emptyset ", "⟨": "(", "⟩": ")",
    "ℝ": r"\mathbb{R} ", "ℤ": r"\mathbb{Z} ", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "…": "...", "’": "'", "′": "'", "∖": r"\setminus ", "∶": ":",
    "，": ",", "：": ":", "（": "(", "）": ")", "⁄": "/",
})  # fmt: skip
_AND_OR = r"(?:and|or)"

_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"\\(?:langle|lparen)(?![A-Za-z])", "("),
        (r"\\(?:rangle|rparen)(?![A-Za-z])", ")"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\(?:[lr]vert|vert|mid)(?![A-Za-z])|\\\|", "|"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"(?<=\d)(?:\{,\}|,\\!|\\,|\\!|\\ |\\thinspace ) ?(?=\d{3}(?!\d))", ""),  # thousands
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:[,;:!> ]|q?quad(?![A-Za-z])|(?:thin|med|thick)space(?![A-Za-z]))|~", " "),
        (r"\s+", " "),
        (r"\\\(|\\\)|\\\[|\\\]|\\?\$|[£€]", ""),
        (r"\s*\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", r"\\degree "),
        (r"\\mathbb(?: ?\{ ?R ?\}| R(?![A-Za-z]))|\\(?:R|Reals|reals)(?![A-Za-z])", r"\\reals "),
        (r"\\(?:varnothing|empty)(?![A-Za-z])", r"\\emptyset "),
        (r"\\degree \s*(?:\\(?:text|mathrm) ?\{ ?[CF] ?\}|[CF](?![A-Za-z]))", r"\\degree "),
        (r"\\[lc]?dots(?![A-Za-z])", "..."),
        (r"\\?%", ""),
        (r"\\l(?:or|and)(?![A-Za-z])|\\(?:vee|wedge)(?![A-Za-z])", ","),
        (rf" ?,? ?\\(?:text|mathrm|textrm|mbox) ?\{{ ?,? ?{_AND_OR} ?,? ?\}} ?,? ?", ", "),
        (rf"\\(?:text|mbox) ?\{{([^{{}}]* ){_AND_OR} ([^{{}}]*)\}}", r"\\text{\1}, \\text{\2}"),
        (rf" ?,? {_AND_OR}(?: ?, ?| |(?=\\))", ", "),
        (r"\s+", " "),
        (r"\\neq?(?![A-Za-z])|\\not\s*=|!=", r"\\ne "),
        (r"\\(?:leq|leqslant|le)(?![A-Za-z])|<=|=<", r"\\le "),
        (r"\\(?:geq|geqslant|ge)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
    )
)
_ROW_END = re.compile(r"\\\\(?:\s*\[[^\]]{0,20}\])?")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?")


def tidy(text: str) -> str:
    r"""Remove sizes, spaces, dollars, \%, thousands separators; write signs, relations and `and` in one way.

    >>> tidy(r"\left( 1{,}234 ,\; x \leq 2 \right)"), tidy(r"1, 2, \text{ and } 3")
    ('( 1234 , x \\le 2 )', '1, 2, 3')
    """
    text = re.sub(r"\s+", " ", text.translate(_CHARACTERS))
    # First of all: the second backslash of a row's end is none of a blank's.
    if r"\begin" in text:
        text = _ROW_END.sub(r" \\cr ", text)
    else:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
        text = _ROW_END.sub(" ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text.strip())
    text = re.sub(r"(?<!\.)\.$", "", re.sub(r"  +", " ", text).strip()).strip()
    return re.sub(r"[, ]", "", text) if _GROUPED.fullmatch(text) else text


def normalized(text: str) -> str:
    r"""The tidy text without its unit, degrees, \text and final full stop.

    >>> [normalized(text) for text in (r"5\text{ cm}", r"1{,}234", r"50\%", r"90^\circ", r"\text{Yes}.")]
    ['5', '1234', '50', '90', 'Yes']
    """
    text = re.sub(r"\s*\\degree\s*", " ", without_unit(tidy(text))).strip()
    text = re.sub(r"(?<!\.)\.$", "", text).strip()  # an ellipsis is no full stop: 42... is not 42
    return re.sub(r"[, ]", "", text) if _GROUPED.fullmatch(text) else text
