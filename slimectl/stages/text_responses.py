"""Tokens of samples whose functions set their response as text, and checks of what functions leave in a sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slimectl.data.chat import encode
from slimectl.data.images import images_of
from slimectl.errors import HookError
from slimectl.types import FINISHED, Completion, Prompt, Sample, Status

PER_TOKEN = ("loss_mask", "rollout_log_probs")
"""Fields of a sample that have a value for each response token."""


class GeneratedText(str):
    """The text of a completion. It keeps the tokens, which a sample takes if this text is its response."""

    completion: Completion
    prompt_tokens: list[int]
    temperature: float

    @classmethod
    def of(cls, completion: Completion, prompt_tokens: list[int], temperature: float) -> GeneratedText:
        text = cls(completion.text)
        text.completion, text.prompt_tokens, text.temperature = completion, prompt_tokens, temperature
        return text


def prompt_of(sample: Sample) -> Prompt:
    """Return the prompt of a sample, to be rendered."""
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

    `render` returns the tokens of a prompt. `before` is the sample as the function got it: a function that changes the
    prompt and leaves the tokens has its prompt rendered again. Raises HookError, which begins with `name`, if the
    tokens are not those of prompt and response, or if a list per token has another length.
    """
    response = sample.response
    if not isinstance(response, str):
        raise HookError(f"{name}: sample {sample.index}: response is {type(response).__name__}. Set it to a string")
    sample.response = str(response)
    tokens: list[Any] = sample.tokens
    if tokens == [...]:  # the placeholder of documents
        sample.tokens = []
    if response and not sample.response_length:
        if before is not None and sample.tokens == before.tokens:
            sample.tokens = [] if sample.prompt != before.prompt else sample.tokens
            prompt = list(sample.tokens) or render(prompt_of(sample))
        else:
            prompt = render(prompt_of(sample))
        _append_response(sample, response, prompt, tokenizer, name)
    check_lengths(sample, name)


def _append_response(sample: Sample, response: str, prompt: list[int], tokenizer: Any, name: str) -> None:
    """Set the tokens of a sample whose response length is not known."""
    if sample.tokens[: len(prompt)] != prompt and sample.tokens:
        raise HookError(
            f"{name}: sample {sample.index} has a response, and its tokens do not begin with those of its prompt. "
            f"Leave tokens empty to have both tokenized, or set tokens and response_length"
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


def check_lengths(sample: Sample, name: str) -> None:
    """Raises HookError, which begins with `name`, if fields of a sample have inconsistent lengths."""
    count = sample.response_length
    for field in PER_TOKEN:
        values = getattr(sample, field)
        if values is not None and len(values) != count:
            raise HookError(
                f"{name}: sample {sample.index}: {field} has {len(values)} values for {count} response tokens. "
                f"Give each token one"
            )
    if count > len(sample.tokens):
        raise HookError(
            f"{name}: sample {sample.index} has {len(sample.tokens)} tokens and a response of {count}. "
            f"Set tokens to those of the prompt and the response"
        )
