"""Checks of prompts and sampling parameters, for every engine."""

from __future__ import annotations

from collections.abc import Sequence

from slimectl.errors import SettingsError
from slimectl.types import SamplingParams


def check_prompt(tokens: Sequence[int], params: SamplingParams, *, vocabulary: int, max_context: int) -> None:
    """Refuse prompts that an engine would refuse, or crash on: SGLang 0.5.21 crashes on an unknown token.

    Raises SettingsError.
    """
    check_tokens(tokens, vocabulary=vocabulary, max_tokens=max_context)
    if len(tokens) == max_context and params.max_tokens:
        raise _too_long(tokens, max_context)
    if params.max_tokens < 0:
        raise SettingsError(f"max_tokens: {params.max_tokens} is not a length; ask for at least 0")
    if params.temperature < 0:
        raise SettingsError(f"temperature: {params.temperature} is negative; give 0 (greedy) or more")
    if params.repetition_penalty <= 0:
        raise SettingsError(f"repetition_penalty: {params.repetition_penalty} is not above 0; 1 is none")
    for token, _ in params.logit_bias:
        if not 0 <= token < vocabulary:
            raise SettingsError(f"logit_bias: token {token} is outside the vocabulary of {vocabulary}")


def check_tokens(tokens: Sequence[int], *, vocabulary: int, max_tokens: int) -> None:
    """Raise SettingsError for an empty prompt, more than `max_tokens` tokens, or one outside the vocabulary."""
    if not tokens:
        raise SettingsError("prompt: is empty; give at least one token")
    outlier = min(tokens) if min(tokens) < 0 else max(tokens)
    if not 0 <= outlier < vocabulary:
        raise SettingsError(
            f"prompt: token {outlier} is outside the vocabulary of {vocabulary}; use the model's own tokenizer"
        )
    if len(tokens) > max_tokens:
        raise _too_long(tokens, max_tokens)


def _too_long(tokens: Sequence[int], max_tokens: int) -> SettingsError:
    return SettingsError(
        f"prompt: {len(tokens)} tokens leave no room in a context of {max_tokens}; "
        f"shorten the prompt or raise rollout.max_context_len"
    )
