"""Stop tokens that servers do not know of: special tokens among stop strings, and ends of turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slimectl.types import SamplingParams


@dataclass(frozen=True)
class StopTokens:
    """The tokens of `special` texts, and the `ends` of turns that the model's files do not list.

    The text that servers search for stop strings has no special tokens. So a stop string that is one special token is
    sent as a stop token too.

    >>> StopTokens({"<|im_end|>": 7}).added_to(SamplingParams(stop=("<|im_end|>", "\\n"))).stop_token_ids
    (7,)
    """

    special: Mapping[str, int] = field(default_factory=dict)
    ends: Sequence[int] = ()

    def added_to(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters with the stop tokens of their stop strings and the ends of turns."""
        tokens = [self.special[text] for text in params.stop if text in self.special]
        tokens += [] if params.ignore_eos else self.ends
        if not tokens:
            return params
        return replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *tokens))))


def special_tokens(tokenizer: Any, *, vocabulary: int) -> dict[str, int]:
    """Return the special tokens of a tokenizer that are in the model's vocabulary, by their text."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: number for number, token in added if token.special and number < vocabulary}
