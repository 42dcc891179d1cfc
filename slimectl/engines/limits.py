"""Checks prompts and sampling parameters for every engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from slimectl.errors import SettingsError
from slimectl.types import SamplingParams

MOST = 2**63
"""Upper limit of every number, because engines store counts in 64 bits."""


def check_prompt(tokens: Sequence[int], params: SamplingParams, *, vocabulary: int, max_context: int) -> None:
    """Reject prompts that an engine would reject or crash on. SGLang 0.5.21 crashes on an unknown token.

    Raises SettingsError.
    """
    check_tokens(tokens, vocabulary=vocabulary, max_tokens=max_context)
    if len(tokens) == max_context and params.max_tokens:
        raise _too_long(tokens, max_context)
    for name, value in _numbers(params):
        if not abs(value) < MOST:  # also false for NaN
            raise SettingsError(f"{name}: {str(value)[:40]} is not a number below 2^63")
    if params.max_tokens < 0:
        raise SettingsError(f"max_tokens: {params.max_tokens} is not a length. Use 0 or more.")
    if params.temperature < 0:
        raise SettingsError(f"temperature: {params.temperature} is negative. Use 0 (greedy) or more.")
    if params.repetition_penalty <= 0:
        raise SettingsError(f"repetition_penalty: {params.repetition_penalty} is not above 0. Use 1 for no penalty.")
    if params.top_p <= 0:
        raise SettingsError(f"top_p: {params.top_p} is not above 0. Use 1 to keep all tokens.")
    if params.grammar is not None and params.min_tokens > 0:
        raise SettingsError(
            "min_tokens: cannot be combined with a grammar, which decides where a response may end. Set it to 0."
        )
    check_ids("logit_bias", [token for token, _ in params.logit_bias], vocabulary=vocabulary)
    check_ids("stop_token_ids", params.stop_token_ids, vocabulary=vocabulary)


def check_ids(name: str, tokens: Iterable[int], *, vocabulary: int) -> None:
    """Raise SettingsError for a token outside the vocabulary in the field or setting `name`."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise SettingsError(
                f"{name}: token {token} is outside the vocabulary of {vocabulary}. Use ids of the model's tokenizer."
            )


def _numbers(params: SamplingParams) -> Iterator[tuple[str, float]]:
    """Yield every number except the seed, with the name of its field."""
    for name in (field.name for field in fields(params)):
        value = getattr(params, name)
        if isinstance(value, int | float) and name != "seed":
            yield name, value
    yield from (("logit_bias", bias) for _, bias in params.logit_bias)


def check_tokens(tokens: Sequence[int], *, vocabulary: int, max_tokens: int) -> None:
    """Raise SettingsError for an empty prompt, more than `max_tokens` tokens, or one outside the vocabulary."""
    if not tokens:
        raise SettingsError("prompt: is empty. Give at least one token.")
    outlier = min(tokens) if min(tokens) < 0 else max(tokens)
    if not 0 <= outlier < vocabulary:
        raise SettingsError(
            f"prompt: token {outlier} is outside the vocabulary of {vocabulary}. Use the model's tokenizer."
        )
    if len(tokens) > max_tokens:
        raise _too_long(tokens, max_tokens)


def _too_long(tokens: Sequence[int], max_tokens: int) -> SettingsError:
    return SettingsError(
        f"prompt: {len(tokens)} tokens leave no room in a context of {max_tokens}. "
        f"Shorten the prompt or raise rollout.max_context_len."
    )
