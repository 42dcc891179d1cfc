"""Prompts in, samples out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slimectl.data.buffer import SamplingState
from slimectl.data.imitation import sft_sample
from slimectl.ports import Agent, Engine, OnSample
from slimectl.settings.rollout import RolloutSettings
from slimectl.stages.attempt import Attempts, sampling_params, single_turn
from slimectl.stages.groups import OwnGroups, PromptGroups
from slimectl.stages.long_prompts import demonstration_excess, drop_long
from slimectl.stages.underway import Underway
from slimectl.types import Prompt, Sample, SamplingParams, Status

__all__ = ["demonstrations", "most_in_flight", "rollout", "sampling_params", "single_turn"]

ATTEMPTS_IN_FLIGHT = 1024
"""More than any embedded engine runs at once, so that a long answer at the head never starves it."""


def rollout(
    prompts: Iterable[Prompt],
    engine: Engine,
    tokenizer: Any,
    settings: RolloutSettings,
    *,
    agent: Agent | None = None,
    params: SamplingParams | None = None,
    evaluation: bool = False,
    left_out: Callable[[Prompt], Any] = lambda prompt: None,
    on_sample: OnSample | None = None,
    agent_at: Callable[[str], Agent] | None = None,
    rollout_id: int | None = None,
    source: Any = None,
    epochs: int | None = 1,
) -> Iterator[Sample]:
    """Sample `settings.n_samples_per_prompt` answers to every prompt, siblings together, in the order of the prompts.

    Lazy: prompts are drawn as answers are asked for, at most ATTEMPTS_IN_FLIGHT attempts beyond. An attempt that
    fails becomes a sample of status `failed`, its error in the metadata. `params` replaces what the settings say of
    sampling (evaluation does that). Prompts longer than `settings.max_prompt_len` are `left_out`, but for an
    evaluation, whose prompts are the same for every model; so are those that leave no room for an answer. `on_sample`
    sees each sample, as of round `rollout_id`;
    `agent_at` finds the agent that a sample names. A data source of the user's (`source`) stands in for `prompts`,
    `epochs` times its length.
    """
    attempts = Attempts(engine, tokenizer, settings, agent or single_turn, params, evaluation)
    attempts.on_sample, attempts.agent_at, attempts.rollout_id = on_sample, agent_at, rollout_id
    prompts = attempts.drop_long_prompts(prompts, left_out)
    groups: PromptGroups | OwnGroups = PromptGroups(iter(prompts), attempts, SamplingState())
    if source is not None:
        groups = OwnGroups(source, attempts, SamplingState(), epochs=epochs, left_out=left_out)
    limit = most_in_flight(settings)
    going = Underway(attempts)
    try:
        while groups.begin(going):
            if len(going) >= limit:
                yield from going.oldest()
        while len(going):
            yield from going.oldest()
    finally:
        going.close()


def most_in_flight(settings: RolloutSettings) -> int:
    """Groups that are under way at once at most."""
    return max(1, ATTEMPTS_IN_FLIGHT // settings.n_samples_per_prompt)


def demonstrations(
    prompts: Iterable[Prompt],
    tokenizer: Any,
    settings: RolloutSettings,
    *,
    context: int | None = None,
    left_out: Callable[[Prompt], Any] = lambda prompt: None,
) -> Iterator[Sample]:
    """What `rollout` would yield had the model answered with the label: one sample a prompt, for supervised steps.

    A chat that ends with the assistant is its own demonstration. The loss mask comes from the chat template. One that
    is longer than `context` with its answer, or whose prompt is too long, is `left_out`. Raises RecordError if all are.
    """
    pairs = ((prompt, demonstration(prompt, tokenizer, settings)) for prompt in prompts)
    fitting = drop_long(
        pairs, lambda pair: pair[0], lambda pair: demonstration_excess(pair[1], settings, context), left_out
    )
    return (sample for _, sample in fitting)


def demonstration(prompt: Prompt, tokenizer: Any, settings: RolloutSettings, *, from_message: int = 0) -> Sample:
    """One of them; of a chat, what the assistant said before `from_message` is no part of it."""
    tokens, response_length, mask = sft_sample(
        prompt,
        tokenizer,
        apply_chat_template=settings.apply_chat_template,
        template_kwargs=settings.apply_chat_template_kwargs,
        from_message=from_message,
    )
    return Sample(
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
