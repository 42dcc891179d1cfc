"""Stop tokens that servers do not know: special tokens in stop strings, and end-of-turn tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slimectl.types import SamplingParams


@dataclass(frozen=True)
class StopTokens:
    """Special tokens by text, and end-of-turn tokens (`ends`) that the model's files do not list.

    Servers search for stop strings in text without special tokens. A stop string that is one special token is therefore
    also sent as a stop token.

    >>> StopTokens({"<|im_end|>": 7}).added_to(SamplingParams(stop=("<|im_end|>", "\\n"))).stop_token_ids
    (7,)
    """

    special: Mapping[str, int] = field(default_factory=dict)
    ends: Sequence[int] = ()

    def added_to(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters with the stop tokens for their stop strings and the end-of-turn tokens."""
        tokens = [self.special[text] for text in params.stop if text in self.special]
        tokens += [] if params.ignore_eos else self.ends
        if not tokens:
            return params
        return replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *tokens))))


def special_tokens(tokenizer: Any, *, vocabulary: int) -> dict[str, int]:
    """Return the tokenizer's special tokens that are in the model's vocabulary, by text."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: number for number, token in added if token.special and number < vocabulary}
