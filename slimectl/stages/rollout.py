"""Samples responses to prompts, and turns demonstrations into samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slimectl.chats.model_tokens import unknown_token
from slimectl.data.chat import warn_of_raw_prompt
from slimectl.data.prompts import BadRow, without_bad
from slimectl.data.supervised import sft_sample, stop_tokens
from slimectl.settings.rollout import RolloutSettings
from slimectl.stages.in_flight import InFlightGroups
from slimectl.stages.long_prompts import demonstration_excess, drop_long
from slimectl.stages.whole_rounds import GroupSource, whole_round_samples
from slimectl.types import Prompt, Sample, Status

ATTEMPTS_IN_FLIGHT = 1024
"""Maximum samples in flight. More than any embedded engine runs at once, so a long first response blocks no other."""


def rollout(source: GroupSource, *, max_rounds: int | None = None) -> Iterator[Sample]:
    """Sample `n_samples_per_prompt` responses to every prompt of a source, by group, in the order of the prompts.

    Prompts are read lazily as samples are consumed, with at most ATTEMPTS_IN_FLIGHT samples in flight. A failed attempt
    becomes a sample of status `failed` with its error in the metadata. A user's function that samples whole rounds is
    called for at most `max_rounds` rounds.
    """
    generator = source.generator
    if generator.hooks.sample_rounds is not None:
        yield from whole_round_samples(source, generator.hooks.sample_rounds(generator), max_rounds=max_rounds)
        return
    limit = most_in_flight(generator.settings)
    in_flight = InFlightGroups(generator)
    try:
        while (group := source.next_group()) is not None:
            in_flight.start(group)
            if len(in_flight) >= limit:
                yield from in_flight.wait_oldest()
        while len(in_flight):
            yield from in_flight.wait_oldest()
    finally:
        in_flight.close()


def most_in_flight(settings: RolloutSettings) -> int:
    """Return the maximum number of groups in flight."""
    return max(1, ATTEMPTS_IN_FLIGHT // settings.n_samples_per_prompt)


def demonstrations(
    prompts: Iterable[Prompt],
    tokenizer: Any,
    settings: RolloutSettings,
    *,
    context: int | None = None,
    on_skipped: Callable[[Prompt], Any] = lambda prompt: None,
    on_bad_row: BadRow | None = None,
) -> Iterator[Sample]:
    """Yield one sample per prompt with the label as its response, for supervised training steps.

    A chat that ends with an assistant message is its own demonstration. The loss mask comes from the chat template.
    A sample is passed to `on_skipped` if it is longer than `context`, if its prompt is too long, or if the model has no
    embedding for one of its tokens. Raises RecordError if all are skipped.
    """

    def answer(prompt: Prompt) -> tuple[Prompt, Sample]:
        return prompt, demonstration(prompt, tokenizer, settings)

    def excess(pair: tuple[Prompt, Sample]) -> str:
        return unknown_token(pair[1].tokens, tokenizer) or demonstration_excess(pair[1], settings, context)

    return (
        sample
        for _, sample in drop_long(
            without_bad(map(answer, prompts), on_bad_row), lambda pair: pair[0], excess, on_skipped
        )
    )


def demonstration(prompt: Prompt, tokenizer: Any, settings: RolloutSettings, *, from_message: int = 0) -> Sample:
    """Return the demonstration of one prompt. Assistant messages before `from_message` get loss mask 0."""
    warn_of_raw_prompt(prompt, tokenizer, settings)
    tokens, response_length, mask = sft_sample(
        prompt,
        tokenizer,
        apply_chat_template=settings.apply_chat_template,
        template_kwargs=settings.template_kwargs,
        from_message=from_message,
        end_tokens=() if settings.ignore_eos else stop_tokens(tokenizer, settings.stop_token_ids),
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
        extra=prompt.extra,
        multimodal_inputs={"images": list(prompt.images)} if prompt.images else None,
    )
