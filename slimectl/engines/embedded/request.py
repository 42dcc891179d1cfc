"""A request becomes a sequence, or is refused."""

from __future__ import annotations

import asyncio
import secrets

from slimectl.engines.embedded.detokenizer import Detokenizer, StopScanner
from slimectl.engines.embedded.sequence import Sequence
from slimectl.errors import SettingsError
from slimectl.types import SamplingParams


def requested(
    tokens: list[int],
    params: SamplingParams,
    *,
    vocabulary: int,
    max_context: int,
    end_tokens: frozenset[int],
    detokenizer: Detokenizer,
) -> Sequence:
    """The sequence that continues `tokens`, its answer awaited in the running event loop. Raises SettingsError."""
    _check(tokens, params, vocabulary=vocabulary, max_context=max_context)
    return Sequence(
        prompt=tuple(tokens),
        params=params,
        seed=secrets.randbits(63) if params.seed is None else params.seed % 2**63,
        limit=min(params.max_tokens, max_context - len(tokens)),
        end_tokens=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_tokens),
        future=asyncio.get_running_loop().create_future(),
        scanner=StopScanner(detokenizer, params.stop) if params.stop else None,
    )


def _check(tokens: list[int], params: SamplingParams, *, vocabulary: int, max_context: int) -> None:
    if not tokens:
        raise SettingsError("prompt: is empty; give at least one token")
    strange = min(tokens) if min(tokens) < 0 else max(tokens)
    if not 0 <= strange < vocabulary:
        raise SettingsError(
            f"prompt: token {strange} is outside the vocabulary of {vocabulary}; use the model's own tokenizer"
        )
    if len(tokens) >= max_context:
        raise SettingsError(
            f"prompt: {len(tokens)} tokens leave no room in a context of {max_context}; "
            f"shorten the prompt or raise rollout.max_context_len"
        )
    if params.max_tokens < 1:
        raise SettingsError(f"max_tokens: {params.max_tokens} is not a length; ask for at least 1")
    if params.temperature < 0:
        raise SettingsError(f"temperature: {params.temperature} is negative; give 0 (greedy) or more")
