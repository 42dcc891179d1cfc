"""A Python sandbox: the model writes a fenced program and reads what it printed."""

from __future__ import annotations

import asyncio
from typing import Any

from slimectl.data.conversation import Conversation, Generate
from slimectl.rewards.code import PYTHON, find_program
from slimectl.sandbox.runner import Limits, run_program
from slimectl.types import Sample, SamplingParams

LIMITS = Limits(timeout_s=4.0, test_timeout_s=4.0)
SHOWN = 500
"""Characters of output that the model reads."""


async def generate(
    args: Any, sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any
) -> Sample:
    """Answer with Python at hand; a turn without a program is the answer. Where the kernel grants no namespaces,
    score.rm_options.allow_unsandboxed_namespaces decides, as for the `code` verifier."""
    talk = Conversation(sample, tokenizer, generate, sampling_params, max_turns=4)
    options = args.score.rm_options  # with the name that the setting had before
    weaker = bool(options.get("allow_unsandboxed_namespaces", options.get("allow_weaker", False)))
    while (said := await talk.ask()) is not None:
        fence = find_program(said)
        if fence is None or fence[0] not in PYTHON:
            break
        with talk.tool():
            # In a thread: other answers go on while the program runs.
            output = await asyncio.to_thread(printed, fence[1].text, allow_unsandboxed_namespaces=weaker)
        talk.tell({"role": "user", "content": output})
    return sample


generate.resumes = True  # type: ignore[attr-defined]


def printed(program: str, *, allow_unsandboxed_namespaces: bool = False) -> str:
    """What the program printed, or how it ended."""
    (outcome,) = run_program(
        program, [{"input": ""}], LIMITS, allow_unsandboxed_namespaces=allow_unsandboxed_namespaces
    )
    text = outcome.stdout[:SHOWN]
    return text or "(no output)" if outcome.status == "ended" else f"{text}{outcome.error or outcome.status}"
