"""Tools that hang fail their own attempt, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from typing import Any

import pytest
from test_run_stage import Bytes, Echo, settings

from slimectl.stages.generation import GroupGenerator
from slimectl.stages.prompt_groups import PromptSource
from slimectl.stages.rollout import rollout
from slimectl.stages.tool_timeout import BlockedLoopWatchdog, ToolTimeout
from slimectl.types import Completion, Prompt, Sample, SamplingParams, Status

pytestmark = pytest.mark.slow


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
    samples = list(rollout(PromptSource(prompts, GroupGenerator(Thinking(), Bytes(), given, agent))))
    assert [sample.status for sample in samples] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert (
        samples[1].metadata["error"].startswith("TimeoutError: its tools took more than rollout.tool_timeout_s: 0.2 s")
    )
    assert samples[1].remove_sample
    assert samples[1].response_length == samples[0].response_length  # what it had is kept
    assert sorted(ended) == [0, 1, 2]


def test_no_time_passes_while_nobody_waits_for_samples():
    loop = asyncio.new_event_loop()
    task = loop.create_task(ToolTimeout(GroupGenerator.complete, 0.4).result(asyncio.sleep(0.2, "done")))
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


def search(*, forever: bool) -> None:
    """A tool that computes without waiting, and goes on whatever error comes."""
    while forever:
        try:
            sum(range(1000))
        except Exception:
            continue


def test_an_agent_that_blocks_the_loop_fails_alone_and_its_line_is_named(caplog: pytest.LogCaptureFixture):
    async def agent(arguments: dict[str, Any]) -> Sample:
        sample = arguments["sample"]
        answer = await arguments["generate"](sample.tokens, arguments["sampling_params"])
        sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
        search(forever=sample.index == 1)
        return sample

    limits = settings().rollout.model_copy(update={"tool_timeout_s": 2.0})
    prompts = (Prompt("a", label="a", index=i) for i in range(3))
    with caplog.at_level("WARNING", "slimectl"):
        samples = list(rollout(PromptSource(prompts, GroupGenerator(Echo(), Bytes(), limits, agent))))
    assert [sample.status for sample in samples] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert "it blocked all other attempts for more than rollout.tool_timeout_s: 2 s" in samples[1].metadata["error"]
    assert samples[1].response_length == samples[0].response_length
    assert re.search(r"test_tool_time\.py:\d+ \(search\) has blocked all attempts for 2 s", caplog.text)


def test_a_call_outside_of_python_fails_its_attempt_when_it_returns_and_nothing_after_it():
    class Warned(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.set()

    async def block(seconds: float) -> str:
        warned.wait(seconds)
        return "done"

    async def wait_and_cancel() -> str:
        waiting = asyncio.ensure_future(watchdog.run(asyncio.sleep(3600)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await watchdog.run(asyncio.sleep(0, "done"))

    warned, handler, watchdog = threading.Event(), Warned(), BlockedLoopWatchdog(0.2)
    logging.getLogger("slimectl").addHandler(handler)
    try:
        with pytest.raises(TimeoutError, match=r"Run blocking calls with asyncio\.to_thread, or raise the limit"):
            asyncio.run(watchdog.run(block(500)))
        assert warned.is_set()
    finally:
        logging.getLogger("slimectl").removeHandler(handler)
    warned, watchdog = threading.Event(), BlockedLoopWatchdog(1000.0)
    assert asyncio.run(watchdog.run(block(0.2))) == "done"
    assert asyncio.run(wait_and_cancel()) == "done"
