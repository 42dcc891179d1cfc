"""Log-probabilities of tokens in the formats of OpenAI's API and vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from slimectl.data.chat_responses import chat_log_probs, token_log_prob
from slimectl.data.growing_text import UNFINISHED
from slimectl.data.token_bytes import TokenBytes
from slimectl.types import TopTokens


class TokenLogProb(NamedTuple):
    """A token's log-probability (None without a context), and in `top` the most likely alternatives, if requested.

    Prompt tokens are scored at temperature 1, response tokens as they were sampled. For prompt tokens with `top`,
    `rank` is the number of tokens that are at least as likely.
    """

    log_prob: float | None
    token: int
    top: TopTokens | None = None
    rank: int | None = None


def ranked_tokens(scores: Sequence[TokenLogProb], vocabulary: TokenBytes, top: int) -> list[Any]:
    """Return vLLM's `prompt_logprobs`: per position the token and the `top` likeliest ones, null for the first."""

    def entry(score: TokenLogProb) -> dict[str, Any]:
        likeliest = [(token, log_prob, i + 1) for i, (token, log_prob) in enumerate((score.top or [])[:top])]
        ranked = [*likeliest, (score.token, score.log_prob, score.rank)]
        return {
            str(token): {"logprob": log_prob, "rank": rank, "decoded_token": vocabulary.text(token)}
            for token, log_prob, rank in ranked
        }

    return [None if score.log_prob is None else entry(score) for score in scores]


TokenName = Callable[[int], str]
"""Returns the name of a token for a client: its text, or its id."""


def token_by_id(token: int) -> str:
    """Return the name of a token by id: for broken or duplicate texts, or with `return_tokens_as_token_ids`.

    >>> token_by_id(5)
    'token_id:5'
    """
    return f"token_id:{token}"


def completion_log_probs(
    scores: Sequence[TokenLogProb], vocabulary: TokenBytes, *, offset: int, name: TokenName
) -> dict[str, Any]:
    """Return the `logprobs` of a completion choice, whose tokens begin at character `offset` of its text.

    `top_logprobs` always includes the token itself. It is null for the first token of a prompt.
    """
    offsets = []
    for score in scores:
        offsets.append(offset)
        offset += len(vocabulary.text(score.token))
    return {
        "tokens": [name(score.token) for score in scores],
        "token_logprobs": [score.log_prob for score in scores],
        "top_logprobs": [None if score.log_prob is None else _by_name(score, name) for score in scores],
        "text_offset": offsets,
    }


def _by_name(score: TokenLogProb, name: TokenName) -> dict[str, float | None]:
    """Map token names to log-probabilities. A token whose text is broken or already used is named by its id."""
    named: dict[str, float | None] = {}
    for token, log_prob in [(score.token, score.log_prob), *(score.top or [])]:
        text = name(token)
        if token != score.token or not named:
            named[token_by_id(token) if UNFINISHED in text or text in named else text] = log_prob
    return named


def chat_scores(scores: Sequence[TokenLogProb], vocabulary: TokenBytes, *, name: TokenName) -> dict[str, Any]:
    """Return the `logprobs` of a chat choice."""

    def entry(token: int, log_prob: float | None) -> dict[str, Any]:
        return token_log_prob(name(token), log_prob, vocabulary.of(token))

    return chat_log_probs(
        [(entry(score.token, score.log_prob), [entry(*pair) for pair in score.top or []]) for score in scores]
    )
