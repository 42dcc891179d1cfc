"""A verifiers environment with a tool that adds."""

import verifiers
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def exact(completion, answer, **kwargs):
    return float(answer in str(completion[-1]["content"]))


def load_environment(count=20):
    rows = [{"question": f"{i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(count)]
    return verifiers.ToolEnv(
        dataset=Dataset.from_list(rows), rubric=verifiers.Rubric(funcs=[exact]), tools=[add], max_turns=4
    )
