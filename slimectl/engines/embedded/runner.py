"""Runs the steps of the engine: schedule sequences, run the model, sample the next tokens.

B rows · V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slimectl.engines.embedded.model import Model, Prefix
from slimectl.engines.embedded.scheduler import RunningSequence, Scheduler
from slimectl.engines.embedded.token_sampler import Batch, sample_tokens
from slimectl.errors import SlimectlError

AHEAD = 512
"""Prompt tokens, padding included, that one pass computes with prompts that are still in the queue."""


@dataclass(slots=True)
class Stats:
    """Counters since the start; a prompt that siblings share counts once."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0


class Runner:
    """Steps the sequences of its scheduler, whose slots are those of the cache."""

    def __init__(self, model: Model, *, max_running: int, max_context: int, device: torch.device) -> None:
        self.model = model
        self.scheduler = Scheduler(max_running=max_running)
        self.stats = Stats()
        self._max_context = max_context
        self._device = device
        self._cache = model.new_cache()
        self._prefixes: dict[tuple[int, ...], Prefix] = {}  # computed prompts that siblings in the queue will use
        self._batch: Batch | None = None  # None: the set of running sequences has changed

    @torch.inference_mode()
    def step(self, weight_version: str) -> list[RunningSequence]:
        """Sample one more token for every running sequence, newly admitted ones included; returns the finished ones."""
        admitted = self.scheduler.admit()
        if not self.scheduler.running:
            return []  # those who waited were cancelled
        batch = self._rows(changed=bool(admitted))
        logits_BV = self._logits(batch, admitted)
        tokens_B, log_probs_B = sample_tokens(logits_BV, batch)
        log_probs = log_probs_B.tolist()
        if not math.isfinite(sum(log_probs)):
            raise non_finite_error(weight_version)
        for sequence, token, log_prob in zip(batch.sequences, tokens_B.tolist(), log_probs, strict=True):
            if not sequence.finish:  # else it was aborted, and its answer is delivered already
                sequence.append(token, log_prob, weight_version)
        batch.advance(tokens_B)
        self.stats.steps += 1
        return self._retire()

    def _rows(self, *, changed: bool) -> Batch:
        """Return the running sequences as a batch: the last one, unless some have joined or left."""
        if self._batch is None or changed:
            running = list(self.scheduler.running)
            self._batch = Batch(running, device=self._device, vocabulary=self.model.vocabulary)
        return self._batch

    def _logits(self, batch: Batch, admitted: dict[tuple[int, ...], list[RunningSequence]]) -> Tensor:
        """Return logits of the next token: decoded for running sequences, then those after the new prompts."""
        self._cache.reserve(
            slots=len(batch.sequences),
            tokens=batch.longest,
            max_slots=self.scheduler.max_running,
            max_tokens=self._max_context,
        )
        decoding = len(batch.sequences) - sum(map(len, admitted.values()))
        logits = [self._prefill(admitted, slot=decoding)] if admitted else []
        if decoding:
            self.stats.decode_tokens += decoding
            tokens_B, positions_B = batch.tokens_B[:decoding], batch.positions_B[:decoding]
            logits.insert(0, self.model.decode(tokens_B, positions_B, batch.longest, self._cache))
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _prefill(self, admitted: dict[tuple[int, ...], list[RunningSequence]], *, slot: int) -> Tensor:
        """Compute new prompts, copy each to all its siblings, from `slot` on; returns the logits [B, V] after them."""
        self._compute([prompt for prompt in admitted if prompt not in self._prefixes])
        logits = []
        for prompt, siblings in admitted.items():
            prefix = self._prefixes[prompt]
            self._cache.put(slot, len(siblings), prefix.keys_values)
            slot += len(siblings)
            logits += [prefix.logits_V] * len(siblings)
            for sequence in siblings[not prefix.used :]:
                if not sequence.tokens:
                    sequence.cached_tokens = len(prompt)
            prefix.used = True
        self._prefixes = {prompt: prefix for prompt, prefix in self._prefixes.items() if self.scheduler.awaits(prompt)}
        return torch.stack(logits)

    def _compute(self, prompts: list[tuple[int, ...]]) -> None:
        """Compute prompts, and short ones next in the queue in the same pass: a pass over few tokens costs as much."""
        if not prompts:
            return
        ahead = self.scheduler.upcoming(prompts, tokens=AHEAD)
        new = prompts + [prompt for prompt in ahead if prompt not in self._prefixes]
        self.stats.prefill_tokens += sum(map(len, new))
        for prompt, prefix in zip(new, self.model.prefill(new), strict=True):
            # A copy if it outlives this step: a view would keep the memory of the whole pass.
            self._prefixes[prompt] = prefix.detached() if self.scheduler.awaits(prompt) else prefix

    def _retire(self) -> list[RunningSequence]:
        """Remove finished sequences and close the gaps that they leave in the cache."""
        finished, moves = self.scheduler.retire()
        for source, target in moves:
            self._cache.move(source, target, tokens=self.scheduler.running[target].length)
        if finished:
            self._batch = None
        return finished

    def forget_prefixes(self) -> None:
        """Discard computed prompts: the weights have changed."""
        self._prefixes.clear()

    def retract(self) -> None:
        """Stop running sequences without ending them; keys and values will be recomputed."""
        self._batch = None
        self._prefixes.clear()
        self.scheduler.retract()

    def clear(self) -> list[RunningSequence]:
        """Drop all sequences in flight, and return them."""
        self._batch = None
        self._prefixes.clear()
        return self.scheduler.clear()

    def free(self) -> None:
        """Free the memory of the cache; no sequence may run."""
        self._cache = self.model.new_cache()


def non_finite_error(weight_version: str) -> SlimectlError:
    return SlimectlError(
        f"the logits of weight version {weight_version!r} are not numbers: training has diverged, or the checkpoint "
        f"is damaged; go back to an earlier one"
    )
