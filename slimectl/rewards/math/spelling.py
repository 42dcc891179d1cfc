"""Gives one spelling to formulas that differ only in braces, blanks and the order of sub- and superscripts."""

from __future__ import annotations

import re
from functools import lru_cache

from slimectl.rewards.math.tokens import FUNCTIONS, word_set

MAX_DEPTH = 12

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\s+|.", re.DOTALL)
_UNWRAPPED = word_set("mathrm operatorname text textrm textit mathit mbox mathsf rm")
"""Font commands, which do not change their content."""
_NAMES = FUNCTIONS - {"sqrt"} | word_set("lim sup inf arg deg det dim ker hom Re Im Pr liminf limsup")
"""Commands that print their own name."""
_ARGUMENTS = {"frac": 2, "binom": 2, "sqrt": 1} | dict.fromkeys(
    word_set(
        """vec hat bar overline underline overrightarrow widehat widetilde tilde dot ddot boldsymbol mathbf mathcal
        mathbb mathfrak mathscr boxed"""
    ),
    1,
)
_SYNONYMS = {"rightarrow": "to", "longrightarrow": "to", "leftarrow": "gets", "ast": "*", "star": "*", "Vert": "|",
             "iff": "Leftrightarrow", "varepsilon": "epsilon", "dfrac": "frac", "tfrac": "frac"}  # fmt: skip


@lru_cache(maxsize=4096)
def spelling(text: str) -> str:
    r"""Return the spelling of a formula. A blank between two numbers counts, because 1 2 is not 12.

    >>> spelling(r"\int^1_{0} {x}\mathrm{d}x") == spelling(r"\int_0^{1} x dx"), spelling("1 2"), spelling("x_{12}")
    (True, '1 2', 'x _( 12 )')

    Digits after a bare _ or ^ belong together, as 10^12 is usually meant. In \frac12 each digit is an argument.
    """
    try:
        return " ".join(_Reader(text).sequence(""))
    except (IndexError, RecursionError):  # not a formula: an argument or a brace is missing
        return re.sub(r"(?<=[\w.])\s+(?=[\d.])", "_", text.strip()).replace(" ", "").replace("\n", "")


class _Reader:
    """Reads the tokens of a formula from left to right."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = [token for token in _TOKEN.findall(text) if not token.isspace()]
        self._at = self._depth = 0

    def sequence(self, end: str) -> list[str]:
        """Return the tokens before `end`, with scripts after their bases in a fixed order."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RecursionError
        parts: list[str] = []
        while self._at < len(self._tokens) and self._tokens[self._at] != end:
            if self._tokens[self._at] in ("_", "^", "'"):
                parts += self._scripts()
            else:
                parts += self._atom()
        if end:
            self._at += 1
            if self._at > len(self._tokens):
                raise IndexError
        self._depth -= 1
        return parts

    def _atom(self) -> list[str]:
        """Return a token, the content of a group, or a command with its arguments."""
        token = self._next()
        if token == "{":
            return self.sequence("}")
        if token == "}":
            raise IndexError
        name = _SYNONYMS.get(token[1:], token[1:]) if token[0] == "\\" else ""
        if name in _UNWRAPPED:
            return self._argument(digits=False)
        if name in _NAMES:
            return list(name)
        if name == "sqrt" and self._peek() == "[":
            self._at += 1
            return [r"\sqrt", *_group(self.sequence("]")), *_group(self._argument(digits=False))]
        if name in _ARGUMENTS:
            arguments = [_group(self._argument(digits=False)) for _ in range(_ARGUMENTS[name])]
            return [f"\\{name}", *(part for argument in arguments for part in argument)]
        return [name if name in ("*", "|") else f"\\{name}"] if name else [token]

    def _scripts(self) -> list[str]:
        """Return all scripts of a base: the subscript, then primes and superscript."""
        scripts: dict[str, list[str]] = {"_": [], "^": []}
        while (token := self._peek()) in ("_", "^", "'"):
            self._at += 1
            scripts["^" if token == "'" else token] += [r"\prime"] if token == "'" else self._argument(digits=True)
        return [part for sign, parts in scripts.items() if parts for part in (sign + "(", *parts, ")")]

    def _argument(self, *, digits: bool) -> list[str]:
        """Return the next group or token. For a number, return its first digit, or all with `digits`."""
        token = self._tokens[self._at]
        if not digits and token[0].isdigit() and len(token) > 1:
            self._tokens[self._at] = token[1:]
            return [token[0]]
        if token == "-" and digits:  # 10^-3
            self._at += 1
            return ["-", *self._atom()]
        return self._atom()

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None


def _group(parts: list[str]) -> list[str]:
    return ["(", *parts, ")"]
