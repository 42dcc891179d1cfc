"""Debate of two agents: each answers, reads the other's answer and answers again. One attempt, two samples."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from typing import Any

from slimectl.data.chat import Conversation, Generate
from slimectl.types import Sample, SamplingParams

ROUNDS = 2


async def generate(sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any) -> list[Sample]:
    """Return both sides as samples of one execution. Each is trained on its own messages and reads the other's."""
    sides = []
    for i in range(2):
        side_sample = copy.deepcopy(sample)
        side_sample.metadata["side"] = i
        # Use different seeds. With one seed, both would give the same answer.
        seed = None if sampling_params.seed is None else (sampling_params.seed ^ (i << 32))
        params = dataclasses.replace(sampling_params, seed=seed)
        sides.append(Conversation(side_sample, tokenizer, generate, params, max_turns=ROUNDS))
    for number in range(ROUNDS):
        messages = await asyncio.gather(*(side.ask() for side in sides))
        if number + 1 < ROUNDS:
            for side, reply in zip(sides, reversed(messages), strict=True):
                side.tell({"role": "user", "content": f"Another answered: {reply or ''}\nAnswer again."})
    return [side.sample for side in sides]
