"""Log-probabilities of prompts and responses on the server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from slimectl.data.token_log_probs import TokenLogProb
from slimectl.engines.limits import check_prompt
from slimectl.engines.server.requests import RunningAnswer
from slimectl.engines.server.state import Service
from slimectl.types import SamplingParams, TopTokens

TOGETHER = 4096
"""Maximum tokens per pass, with padding. Other requests get their next token between two passes."""


async def prompt_log_probs(
    service: Service, prompts: Sequence[list[int]], begins: Sequence[int | None], *, top: int = 0
) -> list[list[TokenLogProb]]:
    """Score each prompt from its start position on. None means no scores. Raises the engine's errors."""
    scores: list[list[TokenLogProb]] = [[] for _ in prompts]
    engine = service.thread.engine
    for members in _passes([i for i, start in enumerate(begins) if start is not None], prompts):
        places = [begins[i] or 0 for i in members]
        batch = await service.thread.call(partial(engine.scores, [prompts[i] for i in members], places, top=top))
        for i, start, scored in zip(members, places, batch, strict=True):
            tops: Sequence[TopTokens | None] = scored.top if top else [None] * len(scored.log_probs)
            tokens = prompts[i][start:]
            scores[i] = [TokenLogProb(None, token) for token in tokens[:1]]
            ranks: Sequence[int | None] = scored.ranks or [None] * len(scored.log_probs)
            scores[i] += map(TokenLogProb, scored.log_probs, tokens[1:], tops, ranks)
    return scores


async def prompt_scores(service: Service, prompt: list[int], top: int) -> list[TokenLogProb]:
    """Score one prompt. Raises RequestError or SettingsError if the engine cannot read it."""
    service.check_ready()
    engine = service.thread.engine
    check_prompt(prompt, SamplingParams(max_tokens=1), vocabulary=engine.vocabulary, max_context=engine.max_context)
    [scores] = await prompt_log_probs(service, [prompt], [0], top=top)
    return scores


def _passes(indices: list[int], prompts: Sequence[list[int]]) -> list[list[int]]:
    """Group prompt indices into passes of the model, in order."""
    passes: list[list[int]] = []
    longest = 0
    for i in indices:
        longest = max(longest, len(prompts[i]))
        if passes and (len(passes[-1]) + 1) * longest <= TOGETHER:
            passes[-1].append(i)
        else:
            passes.append([i])
            longest = len(prompts[i])
    return passes


def answer_log_probs(answer: RunningAnswer, start: int, end: int) -> list[TokenLogProb]:
    """Return the log-probabilities of a response's tokens from `start` to `end`."""
    sequence = answer.sequence
    tops: Sequence[TopTokens | None] = sequence.top[start:end] if sequence.top_count else [None] * (end - start)
    return list(map(TokenLogProb, sequence.log_probs[start:end], sequence.tokens[start:end], tops))
