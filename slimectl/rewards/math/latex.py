"""Removes everything from LaTeX and plain text that does not change an answer's value."""

from __future__ import annotations

import re
from functools import lru_cache

from slimectl.rewards.math.characters import latex
from slimectl.rewards.math.leaves import closes_at
from slimectl.rewards.math.thousands import ungrouped
from slimectl.rewards.math.units import without_unit

_AND_OR = r"(?:and|or)"
_SIZES = (
    "tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|displaystyle|textstyle|scriptstyle"
    "|nolimits|hfill|rm|bf|it|sf|tt|bfseries|itshape|boldmath|relax|null"
)
_UNPRINTED = "(?:text)?color|colorbox|[hv]?phantom|[hv]space\\*?|tag\\*?|label"
"""Commands whose first argument is ignored."""

_FONT = re.compile(
    r"(?:\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|normal)|[mhf]box|emph|boldsymbol|boxed))?\s*(?=\{)"
)
_EMPHASIS = re.compile(
    r"(\*{1,3}|_{1,3}|`{1,3}|[\"'])(?P<marked>.+)\1|<(b|i|em|strong|u|code|mark)>(?P<tagged>.*)</\3>|``(?P<quoted>[^`']+)''",
    re.DOTALL,
)
_MARKS = tuple("*_`\"'<")

_ARGUMENT = r"(?:[^{}]|\{[^{}]*\}){1,60}"

_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.", ""),
        (r"\{\s*\\(?:rm|bf|it|sf|tt|bfseries|itshape)(?![A-Za-z])([^{}]*)\}", r"\\mathrm{\1}"),
        (rf"\\(?:{_SIZES})(?![A-Za-z])", ""),
        (rf"\\(?:{_UNPRINTED})\s*\{{[^{{}}]*\}}", ""),
        (r"\\(?:underline|uline|bm|pmb|strut|ensuremath)(?![A-Za-z])", ""),
        (r"\\var(?=(?:epsilon|phi|theta|rho|sigma|kappa)(?![A-Za-z]))", r"\\"),
        (r"(?<![A-Za-z\\])(?:US|AU|CA|NZ|HK|[ACS])\\?\$", ""),
        (r"\\(?:pounds|euro|yen|textdollar|mathdollar|textsterling|texteuro|textyen)(?![A-Za-z])(?:\{\})?", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|limits)(?![A-Za-z])", ""),
        (r"\\(?:langle|lparen)(?![A-Za-z])", "("),
        (r"\\(?:rangle|rparen)(?![A-Za-z])", ")"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\(?:[lr]vert|vert|mid)(?![A-Za-z])|\\\|", "|"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\colon(?![A-Za-z])|(?:\\!)?\{?:\}?(?:\\!)", ":"),
        (r"\{:\}", ":"),
        (r"(?<=\d)(?:\{,\}|,\\!|\\,|\\!|\\ |\\thinspace ) ?(?=\d{3}(?!\d))", ""),  # thousands
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (
            rf"\{{({_ARGUMENT})\\choose(?![A-Za-z])({_ARGUMENT})\}}|^({_ARGUMENT})\\choose(?![A-Za-z])({_ARGUMENT})$",
            r"\\binom{\1\3}{\2\4}",
        ),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:[,;:!> ]|q?quad(?![A-Za-z])|(?:thin|med|thick)space(?![A-Za-z]))|~", " "),
        (r"\s+", " "),
        (r"\\\(|\\\)|\\\[|\\\]|\\?\$|[£€¥₹₽₩₪₫₴₦¢₱]", ""),
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


@lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    r"""Remove sizes, spaces, dollars, \% and thousands separators. Write signs, relations and `and` in one way.

    >>> tidy(r"\left( 1{,}234 ,\; x \leq 2 \right)"), tidy(r"1, 2, \text{ and } 3"), tidy("**1,234 cm²**")
    ('( 1234 , x \\le 2 )', '1, 2, 3', '1234 cm^2')
    """
    text = re.sub(r"\s+", " ", latex(text))
    # First, because the second backslash of a row end must not count as an escaped blank.
    if r"\begin" in text:
        text = _ROW_END.sub(r" \\cr ", text)
    elif "\\" in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
        text = _ROW_END.sub(" ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text.strip())
    text = re.sub(r"(?<!\.)\.$", "", re.sub(r"  +", " ", text).strip()).strip()
    return ungrouped(_without_emphasis(text))


def _without_emphasis(text: str) -> str:
    """Remove fonts, Markdown marks or quotes around the whole text, and its full stop."""
    for _ in range(6):
        inner = _inside(text)
        if inner is None:
            break
        text = re.sub(r"(?<!\.)\.$", "", inner.strip()).strip()
    return text


def _inside(text: str) -> str | None:
    if text[-1:] == "}" and (font := _FONT.match(text)) and closes_at(text[font.end() :]) == len(text) - font.end() - 1:
        return text[font.end() + 1 : -1]
    marked = _EMPHASIS.fullmatch(text) if text[:1] in _MARKS else None
    if marked is None:
        return None
    inner = marked["marked"] or marked["tagged"] or marked["quoted"] or ""
    return None if marked[1] and marked[1][0] in inner else inner


def normalized(text: str) -> str:
    r"""The tidy text without its unit, degrees, \text and final full stop.

    >>> [normalized(text) for text in (r"5\text{ cm}", r"1{,}234", r"50\%", r"90^\circ", r"\text{Yes}.")]
    ['5', '1234', '50', '90', 'Yes']
    """
    text = re.sub(r"\s*\\degree\s*", " ", without_unit(tidy(text))).strip()
    return re.sub(r"(?<!\.)\.$", "", text).strip()  # an ellipsis is not a full stop: 42... is not 42
