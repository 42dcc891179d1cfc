"""Tools that hang fail their own attempt, and nothing else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from test_run_stage import Bytes, Echo, settings

from slimectl.stages.generation import GroupGenerator, ToolTimeout
from slimectl.stages.rollout import rollout
from slimectl.types import Completion, Prompt, Sample, SamplingParams, Status


class Thinking(Echo):
    """Takes longer for an answer than tools may."""

    async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
        await asyncio.sleep(0.3)
        return await super().generate(tokens, params=params)


def test_a_tool_that_hangs_fails_its_attempt_and_the_others_go_on():
    ended = []

    async def agent(offered: dict[str, Any]) -> Sample:
        sample = offered["sample"]
        answer = await offered["generate"](sample.tokens, offered["sampling_params"])
        sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
        try:
            await asyncio.sleep(3600 if sample.index == 1 else 0)
        finally:
            ended.append(sample.index)
        return sample

    given = settings().rollout.model_copy(update={"tool_timeout_s": 0.2})
    prompts = (Prompt("a", label="a", index=i) for i in range(3))
    samples = list(rollout(prompts, Thinking(), Bytes(), given, agent=agent))
    assert [sample.status for sample in samples] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert (
        samples[1].metadata["error"].startswith("TimeoutError: its tools took more than rollout.tool_timeout_s: 0.2 s")
    )
    assert samples[1].remove_sample
    assert samples[1].response_length == samples[0].response_length  # what it had is kept
    assert sorted(ended) == [0, 1, 2]


def test_no_time_passes_while_nobody_waits_for_samples():
    loop = asyncio.new_event_loop()
    task = loop.create_task(ToolTimeout(GroupGenerator.group, 0.4).result(asyncio.sleep(0.2, "done")))
    loop.run_until_complete(asyncio.sleep(0.01))
    time.sleep(0.5)  # a training step, say
    assert loop.run_until_complete(task) == "done"
    loop.close()


def test_every_answer_of_the_model_begins_the_count_anew():
    async def turns() -> str:
        for _ in range(4):
            await tools.generate()
            await asyncio.sleep(0.1)
        return "done"

    async def answer() -> None:
        await asyncio.sleep(0.3)

    tools = ToolTimeout(answer, 0.25)
    assert asyncio.run(tools.result(turns())) == "done"
    with pytest.raises(TimeoutError, match=r"took more than rollout\.tool_timeout_s: 0\.1 s"):
        asyncio.run(ToolTimeout(answer, 0.1).result(asyncio.sleep(9)))
