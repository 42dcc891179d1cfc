"""Code agent: the model writes a fenced Python program and reads its output."""

from __future__ import annotations

import asyncio
from typing import Any

from slimectl.data.chat import Conversation, Generate
from slimectl.rewards.fences import find_program, is_python
from slimectl.rewards.thoughts import after_thought
from slimectl.sandbox.runner import Limits, run_program
from slimectl.types import Sample, SamplingParams

LIMITS = Limits(timeout_s=4.0, test_timeout_s=4.0)
SHOWN = 500
"""Maximum number of output characters that the model reads."""


async def generate(
    args: Any, sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any
) -> Sample:
    """Answer with a Python tool. A turn without a program is the answer.

    If the kernel does not allow namespaces, score.rm_options.allow_unsandboxed_namespaces decides, as for the `code`
    verifier.
    """
    conversation = Conversation(sample, tokenizer, generate, sampling_params, max_turns=4)
    options = args.score.rm_options  # allow_weaker: the setting's former name
    allow_unsandboxed = bool(options.get("allow_unsandboxed_namespaces", options.get("allow_weaker", False)))
    while (message := await conversation.ask()) is not None:
        start = after_thought(message)
        block = find_program(message, start) if start >= 0 else None
        if block is None or (block.language and not is_python(block.language)):
            break
        with conversation.tool():
            # In a thread: other samples continue while the program runs.
            output = await asyncio.to_thread(printed, block.program, allow_unsandboxed_namespaces=allow_unsandboxed)
        conversation.tell({"role": "user", "content": output})
    return sample


generate.resumes = True  # type: ignore[attr-defined]


def printed(program: str, *, allow_unsandboxed_namespaces: bool = False) -> str:
    """Run the program and return its output, or its error."""
    (outcome,) = run_program(
        program, [{"input": ""}], LIMITS, allow_unsandboxed_namespaces=allow_unsandboxed_namespaces
    )
    text = outcome.stdout[:SHOWN]
    return text or "(no output)" if outcome.status == "ended" else f"{text}{outcome.error or outcome.status}"
