"""Ten prompts, `0+1=` to `9+1=`, and what is read of them."""

from __future__ import annotations

from typing import Any

from slimectl.data.columns import PromptOptions
from slimectl.data.prompts import open_prompts

ROWS = [{"prompt": f"{i}+1=", "label": str(i + 1), "metadata": {"i": i}} for i in range(10)]


def texts(*sources: str, **options: Any) -> list[Any]:
    return [prompt.text for prompt in open_prompts([str(source) for source in sources], PromptOptions(**options))]


def expected(*numbers: int) -> list[str]:
    return [f"{i}+1=" for i in numbers]
