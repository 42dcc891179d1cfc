"""Prompts in, samples out."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from slimectl.algorithms.seeds import sample_seed
from slimectl.data.chat import render, sft_sample
from slimectl.errors import HookError, SlimectlError
from slimectl.ports import Agent, Engine
from slimectl.settings.rollout import RolloutSettings
from slimectl.types import Completion, Prompt, Sample, SamplingParams, Status

ATTEMPTS_IN_FLIGHT = 1024
"""More than any embedded engine runs at once, so that a long answer at the head never starves it."""

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


def sampling_params(settings: RolloutSettings) -> SamplingParams:
    """How the settings ask for answers to be drawn, the seed apart."""
    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_response_len,
        min_tokens=settings.min_new_tokens,
        stop=tuple(settings.stop),
        stop_token_ids=tuple(settings.stop_token_ids),
        ignore_eos=settings.ignore_eos,
    )


def rollout(
    prompts: Iterable[Prompt],
    engine: Engine,
    tokenizer: Any,
    settings: RolloutSettings,
    *,
    agent: Agent | None = None,
    params: SamplingParams | None = None,
    evaluation: bool = False,
) -> Iterator[Sample]:
    """Sample `settings.n_samples_per_prompt` answers to every prompt, siblings together, in the order of the prompts.

    Lazy: prompts are drawn as answers are asked for, at most ATTEMPTS_IN_FLIGHT attempts beyond. An attempt that
    fails becomes a sample of status `failed`, its error in the metadata. `params` replaces what the settings say of
    sampling (evaluation does that).
    """
    attempt = _Attempt(
        engine, tokenizer, settings, agent or single_turn, params or sampling_params(settings), evaluation
    )
    limit = max(1, ATTEMPTS_IN_FLIGHT // settings.n_samples_per_prompt)
    for group in _groups(prompts, attempt, limit):
        yield from group


def rollout_groups(
    prompts: Iterable[Prompt],
    engine: Engine,
    tokenizer: Any,
    settings: RolloutSettings,
    *,
    in_flight: int,
    agent: Agent | None = None,
) -> Iterator[list[Sample]]:
    """The same, prompt by prompt, with the answers to `in_flight` prompts under way at once."""
    attempt = _Attempt(engine, tokenizer, settings, agent or single_turn, sampling_params(settings), False)
    return _groups(prompts, attempt, in_flight)


def _groups(prompts: Iterable[Prompt], attempt: _Attempt, limit: int) -> Iterator[list[Sample]]:
    """All answers to one prompt after another, `limit` prompts under way at once."""
    window: deque[asyncio.Task[list[Sample]]] = deque()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_quiet_about_interrupts)
    try:
        for prompt in prompts:
            window.append(loop.create_task(attempt.group(prompt)))
            if len(window) >= limit:
                yield loop.run_until_complete(window.popleft())
        while window:
            yield loop.run_until_complete(window.popleft())
    finally:
        _cancel(loop, window, attempt.engine)
        loop.close()


def _quiet_about_interrupts(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An interrupt ends whichever task it hits, and is raised to the caller too: no need to print it as that task's."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


def _cancel(loop: asyncio.AbstractEventLoop, window: Iterable[asyncio.Task[Any]], engine: Engine) -> None:
    """End what is still in flight, so that neither the engine nor the loop holds on to it."""
    for task in window:
        if task.done() and not task.cancelled():
            task.exception()  # looked at: asyncio prints those that nobody saw, and the first has been raised already
    left = [task for task in window if not task.done()]
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(engine.abort())
    ending = asyncio.all_tasks(loop)
    if ending:
        loop.run_until_complete(asyncio.gather(*ending, return_exceptions=True))


def demonstrations(prompts: Iterable[Prompt], tokenizer: Any, settings: RolloutSettings) -> Iterator[Sample]:
    """What `rollout` would yield had the model answered with the label: one sample a prompt, for supervised steps.

    A chat that ends with the assistant is its own demonstration. The loss mask comes from the chat template.
    """
    for prompt in prompts:
        tokens, response_length, mask = sft_sample(
            prompt,
            tokenizer,
            apply_chat_template=settings.apply_chat_template,
            template_kwargs=settings.apply_chat_template_kwargs,
        )
        yield Sample(
            group_index=prompt.index,
            index=prompt.index,
            prompt=prompt.text,
            tokens=tokens,
            response=tokenizer.decode(tokens[-response_length:]),
            response_length=response_length,
            label=prompt.label,
            loss_mask=mask,
            status=Status.COMPLETED,
            metadata=prompt.metadata,
        )


async def single_turn(
    sample: Sample,
    sampling_params: SamplingParams,
    generate: Callable[[list[int], SamplingParams], Awaitable[Completion]],
) -> Sample:
    """One question, one answer."""
    completion = await generate(sample.tokens, sampling_params)
    sample.append_response_tokens(completion.tokens, log_probs=completion.log_probs, text=completion.text)
    sample.status = FINISHED[completion.finish]
    return sample


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """Everything that the attempts of one call of `rollout` share."""

    engine: Engine
    tokenizer: Any
    settings: RolloutSettings
    agent: Agent
    params: SamplingParams
    evaluation: bool

    async def group(self, prompt: Prompt) -> list[Sample]:
        """All answers to one prompt."""
        settings = self.settings
        tokens = render(
            prompt,
            self.tokenizer,
            apply_chat_template=settings.apply_chat_template,
            template_kwargs=settings.apply_chat_template_kwargs,
        )
        n = settings.n_samples_per_prompt
        made = await asyncio.gather(*(self.one(prompt, tokens, prompt.index * n + i) for i in range(n)))
        return [sample for samples in made for sample in samples]

    async def one(self, prompt: Prompt, tokens: list[int], index: int) -> list[Sample]:
        sample = Sample(
            group_index=prompt.index,
            index=index,
            prompt=prompt.text,
            tokens=tokens,
            label=prompt.label,
            metadata=copy.deepcopy(prompt.metadata),
        )
        text = prompt.text if isinstance(prompt.text, str) else json.dumps(prompt.text, sort_keys=True)
        params = dataclasses.replace(self.params, seed=sample_seed(self.settings.seed, text, index))
        versions: list[str] = []
        cached = 0

        async def generate(tokens: list[int], params: SamplingParams = params) -> Completion:
            nonlocal cached
            completion = await self.engine.generate(tokens, params=params)
            versions.extend(completion.weight_versions)
            cached += completion.cached_tokens
            return completion

        offered = {"sample": sample, "sampling_params": params, "generate": generate, "evaluation": self.evaluation}
        try:
            made = _samples(await _called(self.agent, offered))
        except SlimectlError:
            raise
        except Exception as error:
            sample.status, sample.remove_sample = Status.FAILED, True
            sample.metadata["error"] = f"{type(error).__name__}: {error}"
            made = [sample]
        for each in made:
            each.weight_versions = each.weight_versions or list(versions)
            if len(made) > 1:
                each.rollout_id = index
        made[0].prefix_cache_info = {"cached_tokens": cached, "total_prompt_tokens": len(tokens)}
        return made


async def _called(agent: Agent, offered: Mapping[str, Any]) -> Any:
    if agent is single_turn:
        return await single_turn(offered["sample"], offered["sampling_params"], offered["generate"])
    result = agent(offered)
    return await result if inspect.isawaitable(result) else result


def _samples(returned: Any) -> list[Sample]:
    """What an agent returned, as a list; a fan-out may have several samples."""
    made = returned if isinstance(returned, list) else [returned]
    if not made or not all(isinstance(each, Sample) for each in made):
        raise HookError(
            f"rollout.custom_generate_function_path: returned {type(returned).__name__}; "
            f"return the Sample or a list of them"
        )
    for each in made:
        if each.status is Status.PENDING:
            each.status = Status.COMPLETED
    return made
