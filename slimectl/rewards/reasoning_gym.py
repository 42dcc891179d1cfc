"""Grades reasoning-gym tasks with the scorers of that library."""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from slimectl.errors import RecordError, requiring
from slimectl.rewards.base import Grade, Span, Verifier, no_answer, quote
from slimectl.rewards.extraction import SOURCE_NAMES, UNCLOSED, find, text_of
from slimectl.types import Sample, json_copy, text_of_label

MAX_ANSWER = 20_000
MAX_EXPRESSION = 1_000
MAX_POWER = 64
_TUPLE_TASKS = ("arc_agi", "rearc")
"""Tasks that compare boards of tuples, which JSON turns into lists."""

_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
_COUNTS = re.compile(r"\b(?:Fraction|Decimal|compute_decimal_reward)\(")
_EXPONENT = re.compile(r"\d[\d_.,]*[eE][+-]?[\d_,]{4}")
"""As in 1e999999999, a number of a billion digits. It contains no blanks, and commas are removed."""

_NOT_FINITE = re.compile(r"(?<!\w)s?nan\d*j?(?!\w)|^\W*(?:inf|infinity|infty|infj)(?!\w)|∞", re.IGNORECASE)
"""An answer that contains NaN, or starts with an infinity: a scorer's `min(abs(a - b), 1)` would accept it."""

_CALLABLE = re.compile("sqrt|a?(?:sin|cos|tan)|(?:sin|cos|tan)h|cot|sec|csc|exp|log|ln|Abs|Rational")
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitXor)


@dataclass(frozen=True)
class ReasoningGym(Verifier):
    """The task's own score, 0 to 1, of the last <answer> tag, or else of the whole response.

    `metadata.source_dataset` names the task and `metadata.entry` is its entry. Without an entry, it is built from
    prompt, label and metadata. Some scorers `eval` the answer. They get only literals and arithmetic, and anything else
    scores 0.0. Raises RecordError for metadata without a task, and for samples with neither entry nor label.
    """

    def explain(self, sample: Sample) -> Grade:
        task = _task(sample)
        scorer, entry = _scorer(task), _entry(sample)
        answer, source = _find(sample)
        if answer is None:
            return no_answer(source, UNCLOSED)
        reward = 0.0
        if len(answer.text) > MAX_ANSWER:
            reason = f"{len(answer.text)} characters, over the limit of {MAX_ANSWER}"
        elif _NOT_FINITE.search(answer.text) and answer.text != text_of_label(sample.label):  # but `nan` is also a word
            reason = "not a finite number, which cannot be compared"
        elif (scorer.counts or scorer.evaluates) and _EXPONENT.search(answer.text):
            reason = f"an exponent of more than three digits, which the scorer of {task} would write out"
        elif scorer.evaluates and not is_safe_to_eval(answer.text):
            reason = f"neither a literal nor small arithmetic, and the scorer of {task} evaluates its input"
        else:
            try:
                with warnings.catch_warnings():  # numpy's warnings would print the answer to stderr
                    warnings.simplefilter("ignore")
                    score = float(scorer.score(answer.text, entry))
                reward = min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0
                reason = f"the scorer of {task} gives {score:g} for the label {quote(text_of_label(sample.label))}"
            except Exception as error:  # an answer that makes a scorer raise counts as rejected
                reason = f"the scorer of {task} does not accept it: {type(error).__name__}"
        return Grade(reward, source, reason, answer.text, answer.span)

    def extract(self, sample: Sample) -> str | None:
        return text_of(_find(sample)[0])


def _find(sample: Sample) -> tuple[Span | None, str]:
    """The answer (None if the thought never closes) and the name of its source."""
    tagged = find(sample, "answer_tag")
    if tagged is None:
        return find(sample, "response"), SOURCE_NAMES["response"]
    return tagged, SOURCE_NAMES["answer_tag"]


def is_safe_to_eval(text: str) -> bool:
    """Whether the text is safe to evaluate, because it can only do small arithmetic or build a literal.

    >>> is_safe_to_eval("(3 + 4)*x**2"), is_safe_to_eval("[['Q', '_']]")
    (True, True)
    >>> is_safe_to_eval("open('x', 'w')"), is_safe_to_eval("9**9**9")
    (False, False)

    It cannot contain both strings and calls, because sympy parses and so evaluates a string argument of a function.
    """
    plain = text.strip()
    if re.fullmatch(r"[\w\s]*", plain) and "__" not in plain:
        return True  # rows of words or digits, which no evaluator accepts as more than a name or a number
    if "#" in plain or (len(plain) > MAX_EXPRESSION and not plain.startswith(("[", "{"))):
        return False
    try:
        with warnings.catch_warnings():  # of literals such as 1or 2
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(plain, mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return not re.search(r"[(\[{'\"!@:;\\]|\.\s*[A-Za-z_]|__|\*\*|<<", plain)
    strings = any(isinstance(node, ast.Constant) and isinstance(node.value, str) for node in nodes)
    containers = any(isinstance(node, ast.List | ast.Tuple | ast.Dict) for node in nodes)
    if (strings or containers) and any(isinstance(node, ast.BinOp) for node in nodes):
        return False  # [0] * 10**9 fills the memory
    calls = any(isinstance(node, ast.Call) for node in nodes)
    return (
        not (strings and calls) and sum(isinstance(n, ast.Pow) for n in nodes) <= 50 and all(map(_is_harmless, nodes))
    )


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        is_allowed = isinstance(node.func, ast.Name) and _CALLABLE.fullmatch(node.func.id) and not node.keywords
        return bool(is_allowed) and not any(
            isinstance(inner, ast.Call) for argument in node.args for inner in ast.walk(argument)
        )
    if isinstance(node, ast.Name):
        return "__" not in node.id
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float | str)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _is_small_power(node)
    return isinstance(
        node, (ast.BinOp, ast.UnaryOp, ast.List, ast.Tuple, ast.Dict, ast.expr_context, ast.UAdd, ast.USub, *_OPERATORS)
    )


def _is_small_power(node: ast.BinOp) -> bool:
    if any(isinstance(inner, ast.Pow) for inner in ast.walk(node.left)):
        return False
    if isinstance(node.right, ast.Name):
        return True
    for inner in ast.walk(node.right):
        if isinstance(inner, ast.Pow | ast.Mult | ast.Call):
            return False
        if isinstance(inner, ast.Constant) and not (isinstance(inner.value, int | float) and inner.value <= MAX_POWER):
            return False
    return True


def _task(sample: Sample) -> str:
    entry = sample.metadata.get("entry")
    inner = entry.get("metadata") if isinstance(entry, dict) else None
    task = sample.metadata.get("source_dataset") or (inner or {}).get("source_dataset")
    if not isinstance(task, str):
        raise RecordError(
            f"sample {sample.index}: metadata.source_dataset: missing. It identifies the reasoning-gym "
            f"task. Use prompts of reasoning_gym:TASK, or another verifier: --rm-type NAME"
        )
    return task


def _entry(sample: Sample) -> dict[str, Any]:
    """Return a copy of the task's entry, because some scorers modify their argument."""
    entry = sample.metadata.get("entry")
    if not isinstance(entry, dict):
        if sample.label is None or isinstance(sample.label, list | dict):
            fault = "missing" if sample.label is None else "a list or an object"
            raise RecordError(
                f"sample {sample.index}: label: {fault}, and metadata.entry is missing. Give the entry, or one answer."
            )
        entry = {"question": sample.prompt, "answer": text_of_label(sample.label), "metadata": sample.metadata}
    copied: dict[str, Any] = json_copy(entry)
    if _task(sample) in _TUPLE_TASKS:
        copied["metadata"] = _as_tuples(copied["metadata"])
    return copied


def _as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_tuples(member) for key, member in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


class _Scorer(NamedTuple):
    """A task's scorer, with flags: whether its module evaluates text as code, and whether it parses exact numbers."""

    score: Callable[[str, dict[str, Any]], float]
    evaluates: bool
    counts: bool


@cache
def _scorer(task: str) -> _Scorer:
    with requiring("reasoning-gym", extra="quickstart", wanted_by="score.rm_type=reasoning_gym"):
        import reasoning_gym
    try:
        scorer = reasoning_gym.get_score_answer_fn(task)
    except Exception as error:
        raise RecordError(f"metadata.source_dataset: {task!r} is not a reasoning-gym task: {error}") from None
    source = inspect.getsource(sys.modules[type(scorer.__self__).__module__])
    return _Scorer(scorer, _EVALUATES.search(source) is not None, _COUNTS.search(source) is not None)
