"""Two agents debate: each answers, reads the other's answer, and answers again. One attempt, two samples."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from typing import Any

from slimectl.data.conversation import Conversation, Generate
from slimectl.types import Sample, SamplingParams

ROUNDS = 2


async def generate(sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any) -> list[Sample]:
    """Both sides as samples of one execution: each is trained on what it said itself, and reads the other."""
    sides = []
    for i in range(2):
        own = copy.deepcopy(sample)
        own.metadata["side"] = i
        # Seeds of their own, or both would say the same.
        seed = None if sampling_params.seed is None else (sampling_params.seed ^ (i << 32))
        params = dataclasses.replace(sampling_params, seed=seed)
        sides.append(Conversation(own, tokenizer, generate, params, max_turns=ROUNDS))
    for number in range(ROUNDS):
        said = await asyncio.gather(*(side.ask() for side in sides))
        if number + 1 < ROUNDS:
            for side, heard in zip(sides, reversed(said), strict=True):
                side.tell({"role": "user", "content": f"Another answered: {heard or ''}\nAnswer again."})
    return [side.sample for side in sides]
