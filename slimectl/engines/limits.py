"""What no engine is asked, wherever it is."""

from __future__ import annotations

from collections.abc import Sequence

from slimectl.errors import SettingsError
from slimectl.types import SamplingParams


def check_prompt(tokens: Sequence[int], params: SamplingParams, *, vocabulary: int, max_context: int) -> None:
    """Refuse what an engine would refuse, or die of: SGLang 0.5.21 does, of a token outside the vocabulary.

    Raises SettingsError.
    """
    check_tokens(tokens, vocabulary=vocabulary, most=max_context)
    if len(tokens) == max_context and params.max_tokens:
        raise _too_long(tokens, max_context)
    if params.max_tokens < 0:
        raise SettingsError(f"max_tokens: {params.max_tokens} is not a length; ask for at least 0")
    if params.temperature < 0:
        raise SettingsError(f"temperature: {params.temperature} is negative; give 0 (greedy) or more")


def check_tokens(tokens: Sequence[int], *, vocabulary: int, most: int) -> None:
    """Raises SettingsError for tokens that a model cannot read at once: none, more than `most`, unknown ones."""
    if not tokens:
        raise SettingsError("prompt: is empty; give at least one token")
    strange = min(tokens) if min(tokens) < 0 else max(tokens)
    if not 0 <= strange < vocabulary:
        raise SettingsError(
            f"prompt: token {strange} is outside the vocabulary of {vocabulary}; use the model's own tokenizer"
        )
    if len(tokens) > most:
        raise _too_long(tokens, most)


def _too_long(tokens: Sequence[int], most: int) -> SettingsError:
    return SettingsError(
        f"prompt: {len(tokens)} tokens leave no room in a context of {most}; "
        f"shorten the prompt or raise rollout.max_context_len"
    )
