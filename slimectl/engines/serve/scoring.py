"""Log-probabilities of prompt tokens, which /generate returns from logprob_start_len on."""

from __future__ import annotations

from functools import partial

from slimectl.engines.serve.fields import Fields
from slimectl.engines.serve.service import Service

TOGETHER = 4096
"""Tokens, padding included, per pass; between two passes other requests get their next token."""

Judged = list[tuple[float | None, int]]
"""(log-probability, token) of a prompt's tokens; the first has none, because it has no context."""


def starts(fields: Fields, prompts: list[list[int]]) -> list[int | None]:
    """Parse logprob_start_len, one for all prompts or a list: the first token to score of each; None for none.

    Raises Refused for one outside its prompt.
    """
    name, raw = "logprob_start_len", fields.raw("logprob_start_len")
    if not fields.flag("return_logprob") or raw is None:
        return [None] * len(prompts)
    listed = raw if isinstance(raw, list) else [raw] * len(prompts)
    if len(listed) != len(prompts):
        raise fields.refuse(name, f"are {len(listed)} for {len(prompts)} prompts")
    positions: list[int | None] = []
    for prompt, start in zip(prompts, listed, strict=True):
        if type(start) is not int or not -1 <= start < max(1, len(prompt)):
            raise fields.refuse(name, f"is no place in a prompt of {len(prompt)} tokens, nor -1 for none")
        positions.append(None if start == -1 else start)
    return positions


async def judged(service: Service, prompts: list[list[int]], begins: list[int | None]) -> list[Judged]:
    """Score each prompt from its start position on. Raises what the engine raises."""
    scores: list[Judged] = [[] for _ in prompts]
    for members in _passes([i for i, start in enumerate(begins) if start is not None], prompts):
        places = [begins[i] or 0 for i in members]
        engine = service.thread.engine
        batch_log_probs = await service.thread.call(partial(engine.log_probs, [prompts[i] for i in members], places))
        for i, start, log_probs in zip(members, places, batch_log_probs, strict=True):
            scores[i] = list(zip([None, *log_probs], prompts[i][start:], strict=True))
    return scores


def _passes(indices: list[int], prompts: list[list[int]]) -> list[list[int]]:
    """Group the prompt indices that one pass of the model computes together, in order."""
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
