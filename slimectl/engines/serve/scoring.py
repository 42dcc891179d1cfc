"""How likely the prompt itself is: what /generate adds where logprob_start_len says from which token on."""

from __future__ import annotations

from functools import partial

from slimectl.engines.serve.fields import Fields
from slimectl.engines.serve.service import Service

TOGETHER = 4096
"""Tokens, padding included, that one pass judges; between two passes others get their next token."""

Judged = list[tuple[float | None, int]]
"""(log-probability, token) of a prompt's tokens; the first has none, as nothing is known to stand before it."""


def starts(fields: Fields, prompts: list[list[int]]) -> list[int | None]:
    """The first token of each prompt that is asked about: logprob_start_len, one for all or a list; None for none.

    Raises Refused for one outside its prompt.
    """
    name, given = "logprob_start_len", fields.raw("logprob_start_len")
    if not fields.flag("return_logprob") or given is None:
        return [None] * len(prompts)
    listed = given if isinstance(given, list) else [given] * len(prompts)
    if len(listed) != len(prompts):
        raise fields.refuse(name, f"are {len(listed)} for {len(prompts)} prompts")
    found: list[int | None] = []
    for prompt, start in zip(prompts, listed, strict=True):
        if type(start) is not int or not -1 <= start < max(1, len(prompt)):
            raise fields.refuse(name, f"is no place in a prompt of {len(prompt)} tokens, nor -1 for none")
        found.append(None if start == -1 else start)
    return found


async def judged(service: Service, prompts: list[list[int]], begins: list[int | None]) -> list[Judged]:
    """Of each prompt what is asked about. Raises what the engine raises."""
    found: list[Judged] = [[] for _ in prompts]
    for members in _passes([i for i, start in enumerate(begins) if start is not None], prompts):
        places = [begins[i] or 0 for i in members]
        engine = service.thread.engine
        known = await service.thread.call(partial(engine.log_probs, [prompts[i] for i in members], places))
        for i, start, log_probs in zip(members, places, known, strict=True):
            found[i] = list(zip([None, *log_probs], prompts[i][start:], strict=True))
    return found


def _passes(wanted: list[int], prompts: list[list[int]]) -> list[list[int]]:
    """Indices of the prompts that go through the model together, in order."""
    passes: list[list[int]] = []
    longest = 0
    for i in wanted:
        longest = max(longest, len(prompts[i]))
        if passes and (len(passes[-1]) + 1) * longest <= TOGETHER:
            passes[-1].append(i)
        else:
            passes.append([i])
            longest = len(prompts[i])
    return passes
