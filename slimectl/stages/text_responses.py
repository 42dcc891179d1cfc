"""Tokenizes samples whose function set only a text response, and validates samples that functions return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slimectl.data.chat import encode
from slimectl.data.images import images_of
from slimectl.errors import HookError, RecordError
from slimectl.types import FINISHED, Completion, Prompt, Sample, Status

PER_TOKEN = ("loss_mask", "rollout_log_probs")
"""Fields of a sample with one value per response token."""


class GeneratedText(str):
    """The text of a completion with its tokens, which a sample gets if this text is its response."""

    completion: Completion
    prompt_tokens: list[int]
    temperature: float

    @classmethod
    def of(cls, completion: Completion, prompt_tokens: list[int], temperature: float) -> GeneratedText:
        text = cls(completion.text)
        text.completion, text.prompt_tokens, text.temperature = completion, prompt_tokens, temperature
        return text


def prompt_of(sample: Sample) -> Prompt:
    """Return the prompt of a sample for rendering."""
    return Prompt(
        sample.prompt,
        label=sample.label,
        index=sample.group_index,
        tools=sample.metadata.get("tools"),
        images=images_of(sample),
    )


def fill_tokens(
    sample: Sample,
    *,
    render: Callable[[Prompt], list[int]],
    tokenizer: Any,
    name: str,
    before: Sample | None = None,
) -> None:
    """Tokenize prompt and response of a sample whose function set only the text of the response.

    `render` returns the tokens of a prompt. `before` is the sample before the function was called. If the function
    changed the prompt but not the tokens, the prompt is rendered again. Raises HookError, which begins with `name`, if
    the tokens do not match prompt and response, or if a per-token list has another length.
    """
    response = sample.response
    if not isinstance(response, str):
        raise HookError(f"{name}: sample {sample.index}: response is {type(response).__name__}. Set it to a string")
    sample.response = str(response)
    tokens: list[Any] = sample.tokens
    if tokens == [...]:  # the placeholder used in the docs
        sample.tokens = []
    if response and not sample.response_length:
        if before is not None and sample.tokens == before.tokens:
            sample.tokens = [] if sample.prompt != before.prompt else sample.tokens
            prompt = list(sample.tokens) or _rendered(sample, render, name)
        else:
            prompt = _rendered(sample, render, name)
        _append_response(sample, response, prompt, tokenizer, name)
    check_sample(sample, name)


def _rendered(sample: Sample, render: Callable[[Prompt], list[int]], name: str) -> list[int]:
    """Return the tokens of a sample's prompt. Raises HookError for an invalid prompt."""
    try:
        return render(prompt_of(sample))
    except RecordError as error:
        raise HookError(f"{name}: sample {sample.index}: {error}") from None


def _append_response(sample: Sample, response: str, prompt: list[int], tokenizer: Any, name: str) -> None:
    """Set the tokens of a sample whose response length is unknown."""
    if sample.tokens[: len(prompt)] != prompt and sample.tokens:
        raise HookError(
            f"{name}: sample {sample.index} has a response, but its tokens do not begin with the prompt's tokens. "
            f"Leave tokens empty to tokenize both, or set tokens and response_length"
        )
    if len(sample.tokens) > len(prompt):
        sample.response_length = len(sample.tokens) - len(prompt)
    elif isinstance(response, GeneratedText) and response.prompt_tokens == prompt:
        sample.tokens, mask, completion = prompt, sample.loss_mask, response.completion
        sample.loss_mask = sample.rollout_log_probs = None
        sample.append_response_tokens(completion.tokens, completion.log_probs, loss_mask=completion.loss_mask)
        sample.loss_mask = sample.loss_mask if mask is None else mask
        sample.rollout_temperature = sample.rollout_temperature or response.temperature
        sample.weight_versions = sample.weight_versions or list(completion.weight_versions)
        sample.status = FINISHED[completion.finish_reason] if sample.status is Status.PENDING else sample.status
    else:
        tokens = encode(tokenizer, response)
        sample.tokens, sample.response_length = [*prompt, *tokens], len(tokens)


def check_sample(sample: Sample, name: str) -> None:
    """Raise HookError, which begins with `name`, for an unknown status or fields of inconsistent lengths."""
    count, where = sample.response_length, f"{name}: sample {sample.index}"
    if not isinstance(sample.status, Status):
        if sample.status not in list(Status):
            statuses = ", ".join(status.name for status in Status)
            raise HookError(f"{where}: status is {sample.status!r:.40}. Set it to one of Sample.Status: {statuses}")
        sample.status = Status(sample.status)
    for field in PER_TOKEN:
        values = getattr(sample, field)
        if values is not None and len(values) != count:
            raise HookError(
                f"{where}: {field} has {len(values)} values for {count} response tokens. Set one value per token"
            )
    if count and count >= len(sample.tokens):
        raise HookError(
            f"{where}: tokens has {len(sample.tokens)} values, but the response has {count}. "
            f"Set tokens to the tokens of prompt and response"
        )
