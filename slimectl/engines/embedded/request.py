"""Creates the sequence of a request, or refuses the request."""

from __future__ import annotations

import asyncio
import secrets

from slimectl.engines.embedded.detokenizer import Detokenizer, StopScanner
from slimectl.engines.embedded.sequence import Sequence
from slimectl.engines.limits import check_prompt
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
    """Create the sequence that continues `tokens`; its answer is awaited in the running loop. Raises SettingsError."""
    check_prompt(tokens, params, vocabulary=vocabulary, max_context=max_context)
    return Sequence(
        prompt=tuple(tokens),
        params=params,
        seed=secrets.randbits(63) if params.seed is None else params.seed % 2**63,
        limit=min(params.max_tokens, max_context - len(tokens)),
        end_tokens=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_tokens),
        future=asyncio.get_running_loop().create_future(),
        scanner=StopScanner(detokenizer, params.stop) if params.stop else None,
    )
