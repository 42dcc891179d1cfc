"""Log-probabilities, ranks and alternatives of the tokens of a given text.

T tokens · C tokens of a chunk · E hidden size · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slimectl.types import TopTokens

CHUNK_LOGITS = 2**23
"""Maximum number of logits in memory at once: 32 MiB in float32."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of the tokens of a text and, if requested, the likeliest tokens at each position.

    `ranks` then has the rank of each token: the number of tokens that are at least as likely, including itself.
    """

    log_probs: list[float]
    top: list[TopTokens]
    ranks: list[int]


def token_scores(
    tokens_T: Tensor, states_TE: Tensor, head: Callable[[Tensor], Tensor], *, start: int, top: int, vocabulary: int
) -> TokenScores:
    """Score the tokens after position `start` of a text, with the `top` likeliest at each.

    `head` returns the logits [C, V] of hidden states [C, E].
    """
    log_probs: list[float] = []
    top_tokens: list[TopTokens] = []
    ranks: list[int] = []
    last, chunk = len(tokens_T) - 1, max(1, CHUNK_LOGITS // vocabulary)
    for position in range(start, last, chunk):
        end = min(position + chunk, last)
        log_p_CV = torch.log_softmax(head(states_TE[position:end]), -1, dtype=torch.float32)
        log_p_C1 = log_p_CV.gather(1, tokens_T[position + 1 : end + 1, None])
        log_probs += log_p_C1[:, 0].tolist()
        if top:
            ranks += (log_p_CV >= log_p_C1).sum(-1).tolist()
            values_CN, ids_CN = log_p_CV.topk(min(top, vocabulary))
            rows = zip(ids_CN.tolist(), values_CN.tolist(), strict=True)
            top_tokens += [list(zip(ids, values, strict=True)) for ids, values in rows]
    return TokenScores(log_probs, top_tokens, ranks)
