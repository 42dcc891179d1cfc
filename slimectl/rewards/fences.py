"""Finds the program in a response, which is the last fenced block of Python."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from slimectl.rewards.base import Span
from slimectl.rewards.extraction import trimmed

MAX_CLOSINGS = 8
"""Maximum number of fences of a kind that are tried as the end of a block. Each try parses the text before it."""

MAX_AHEAD = 64
"""Maximum number of fences that are considered as the end of a block."""

MAX_PARSED = 500_000
"""Total number of parsed characters per response, which limits the time for adversarial responses."""

_PYTHON = re.compile(r"(?:i?python|py|pypy)[-\d.]*")
_FENCE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<info>[^`\n]*)$|"
    r"(?<![`~])(?P<behind>`{3,}+|~{3,}+)[ \t]*+(?P<python>(?:i?python|py|pypy)[-\d.]*(?![\w`])[^`\n]*|\r?)$",
    re.MULTILINE | re.IGNORECASE,
)
"""A fence on its own line or after text. After text, a Python fence opens a block, and a bare fence closes it."""

_NOT_CODE = re.compile(r">>>|(?:\s*(?:#[^\n]*)?(?:\n|$))*+$")
"""An interpreter transcript, or only comments."""

_LANGUAGE = re.compile(r"\{?\s*\.?([\w+#.-]*)")


class Block(NamedTuple):
    """A closed fenced block: its language in lower case ("" if not named), its text, and the program that runs."""

    language: str
    text: Span
    program: str


class _Fence(NamedTuple):
    start: int
    end: int
    mark: str
    info: str
    behind: bool

    @property
    def opens(self) -> bool:
        return bool(self.info) or not self.behind

    def closes(self, opening: _Fence) -> bool:
        return not self.info and self.mark.startswith(opening.mark)


def is_python(language: str) -> bool:
    """Whether a fence with this language holds Python."""
    return _PYTHON.fullmatch(language) is not None


def find_program(response: str, start: int = 0) -> Block | None:
    """Return the last block marked as Python, else the last unmarked program, or None if no block is closed.

    Only the response from `start` on is searched. If there is neither, the last block is returned, preferably an
    unmarked one. Its language or syntax error then explains why nothing runs. Interpreter transcripts (>>>) and
    comments without code do not count.
    """
    blocks = [
        block._replace(text=Span(block.text.text, start + block.text.start)) for block in _Blocks(response[start:])
    ][::-1]
    for block in blocks:
        if is_python(block.language) and _NOT_CODE.match(block.program) is None:
            return block
    unnamed = [block for block in blocks if not block.language]
    programs = [block for block in unnamed if _is_program(block.program)]
    return next(iter([*programs, *unnamed, *blocks]), None)


class _Blocks:
    """Finds the closed blocks of a response, in order.

    A Python block ends at the first fence that leaves valid Python before it, or else at the first fence. So a fence
    inside a string, such as an example in a docstring, closes nothing. A fence may directly follow code.
    """

    def __init__(self, response: str) -> None:
        self._response = response
        self._fences = [_fence(match) for match in _FENCE.finditer(response)]
        self._parsed = 0

    def __iter__(self) -> Iterator[Block]:
        at = 0
        while at < len(self._fences):
            opening = self._fences[at]
            language_match = _LANGUAGE.match(opening.info)
            language = language_match[1].lower() if language_match else ""
            closing = self._closing(at, language) if opening.opens else None
            if closing is not None:
                yield self._block(language, opening.end, self._fences[closing].start)
                at = closing
            at += 1

    def _block(self, language: str, start: int, end: int) -> Block:
        text = trimmed(self._response, start, end)
        lines = self._response[start:end].strip("\r\n")
        # Shared indentation belongs to the block, as in a list.
        return Block(language, text, textwrap.dedent(lines).strip() if lines[:1] in (" ", "\t") else text.text)

    def _closing(self, at: int, language: str) -> int | None:
        """Return the fence that closes the block of the fence `at`, or None if another block starts first."""
        opening = self._fences[at]
        first = next(self._closings(at), None)
        if first is None:
            return None
        text = self._response[opening.end : self._fences[first].start]
        could_go_on = self._fences[first].behind or '"""' in text or "'''" in text
        if could_go_on and (not language or is_python(language)):
            for behind in (False, True):
                for closing in self._closings(at, behind=behind):
                    if self._is_python(opening.end, self._fences[closing].start, behind=behind):
                        return closing
        return None if any(fence.info and fence.opens for fence in self._fences[at + 1 : first]) else first

    def _closings(self, at: int, *, behind: bool | None = None) -> Iterator[int]:
        """Yield the first fences that may close a block: after text, on their own lines, or both (None)."""
        opening, count = self._fences[at], 0
        for number in range(at + 1, min(at + 1 + MAX_AHEAD, len(self._fences))):
            fence = self._fences[number]
            if fence.closes(opening) and behind in (None, fence.behind):
                yield number
                count += 1
                if count == MAX_CLOSINGS:
                    return

    def _is_python(self, start: int, end: int, *, behind: bool) -> bool:
        """Whether the text is Python. A fence `behind` code must not be part of a comment, where any text is valid."""
        text = textwrap.dedent(self._response[start:end])
        self._parsed += len(text)
        is_python = self._parsed <= MAX_PARSED and parsed(text) is not None
        return is_python and not (behind and parsed(text + "(") is not None)


def _fence(match: re.Match[str]) -> _Fence:
    info = (match["info"] or match["python"] or "").strip()
    info = "" if info.startswith("<") else info  # the end of a turn or of an XML element
    return _Fence(*match.span(), match["fence"] or match["behind"], info, match["behind"] is not None)


def _is_program(text: str) -> bool:
    """Whether a text is Python that does more than list values, unlike printed output."""
    tree = parsed(text)
    return tree is not None and not all(map(_does_nothing, tree.body))


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.AnnAssign):  # as in "Output: 4"
        return statement.value is None
    kinds = (ast.Constant, ast.Name, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.unaryop, ast.expr_context)
    return isinstance(statement, ast.Expr) and all(isinstance(node, kinds) for node in ast.walk(statement.value))


def parsed(text: str) -> ast.Module | None:
    """Return the syntax tree of a text, or None if it is not valid Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
