"""Calculator agent: the model writes `<calc>2*21</calc>` and reads the value."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from slimectl.data.chat import Conversation, Generate
from slimectl.types import Sample, SamplingParams

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
MAX_DIGITS = 40
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


async def generate(sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any) -> Sample:
    """Answer with a calculator tool. A turn without a call is the answer."""
    conversation = Conversation(sample, tokenizer, generate, sampling_params, max_turns=4)
    while (message := await conversation.ask()) is not None:
        calls = CALL.findall(message)
        if not calls:
            break
        conversation.tell({"role": "user", "content": "\n".join(map(calculated, calls))})
    return sample


generate.resumes = True  # type: ignore[attr-defined]


def calculated(expression: str) -> str:
    """Return the value as a string, or an error message. Never raises on model output.

    >>> calculated("2 * (3 + 4)"), calculated("1/0"), calculated("__import__('os')")
    ('14', 'error: division by zero', 'error: only numbers and + - * / // %')
    """
    try:
        value = _value(ast.parse(expression.strip()[:200], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: only numbers and + - * / // %"
    except ArithmeticError as error:
        return f"error: {error}"
    return str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: int | float = node.value  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError(node)
    if abs(value) >= 10**MAX_DIGITS:
        raise OverflowError("too large")
    return value
