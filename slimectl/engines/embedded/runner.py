"""Runs the engine's steps: schedules sequences, runs the model, and samples the next tokens.

B rows · V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slimectl.engines.embedded.model import Inputs, Prefix
from slimectl.engines.embedded.model_interface import SequenceModel
from slimectl.engines.embedded.prefix_tree import shared_spans
from slimectl.engines.embedded.scheduler import RunningSequence, Scheduler
from slimectl.engines.embedded.token_sampler import Sampled, SamplingBatch, sample_tokens
from slimectl.errors import SettingsError, SlimectlError
from slimectl.system.stdio import logger
from slimectl.types import TopTokens

AHEAD = 512
"""Maximum number of prompt tokens, with padding, in a pass that includes prompts still in the queue."""

OVERFLOW = "temperature, penalties or logit_bias: the probabilities overflow. Use less extreme values."

Admitted = dict[tuple[int, ...], list[RunningSequence]]
"""New sequences by prompt."""


@dataclass(slots=True)
class Stats:
    """Counters since the start.

    A prompt shared by siblings counts once, and tokens from the prefix tree do not count.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0


class Runner:
    """Steps the sequences of its scheduler. Scheduler slots are cache slots."""

    def __init__(
        self, model: SequenceModel, *, max_running: int, max_context: int, prefix_cache_bytes: int, device: torch.device
    ) -> None:
        self.model = model
        self.tree = model.new_tree(prefix_cache_bytes)
        self.scheduler = Scheduler(max_running=max_running, work=self._work)
        self.stats = Stats()
        self._max_context = max_context
        self._device = device
        self._cache = model.new_cache()
        self._prefixes: dict[tuple[int, ...], Prefix] = {}  # computed prompts for siblings in the queue
        self._batch: SamplingBatch | None = None  # None if the set of running sequences has changed

    @torch.inference_mode()
    def step(self, weight_version: str) -> list[RunningSequence]:
        """Sample a token for every running sequence, including newly admitted ones. Return the finished ones."""
        admitted = self.scheduler.admit()
        if not self.scheduler.running:
            return []  # the waiting ones were cancelled
        if admitted:
            self._compute([prompt for prompt in admitted if prompt not in self._prefixes])
            self._share(admitted)
        batch = self._rows(changed=bool(admitted))
        logits_BV = self._logits(batch, admitted)
        tokens_B, log_probs, tops = self._sample(logits_BV, batch)
        if not math.isfinite(sum(log_probs)):
            self._fail_rows(logits_BV, log_probs, batch, weight_version)
        for sequence, token, log_prob, top in zip(batch.sequences, tokens_B.tolist(), log_probs, tops, strict=True):
            sequence.computed = sequence.length
            if not sequence.finish:  # else it was aborted, and its response has been delivered
                try:
                    sequence.append(token, log_prob, weight_version, top)
                except Exception as error:  # from a function that follows the response
                    sequence.end_with(error)
        batch.advance(tokens_B)
        self.stats.steps += 1
        return self._retire()

    def _sample(self, logits_BV: Tensor, batch: SamplingBatch) -> tuple[Tensor, list[float], list[TopTokens]]:
        """Return a token for each row [B], its log-probability, and the likeliest tokens at its position.

        If sampling fails, each row is sampled separately, so that an error ends only its own sequence.
        """
        try:
            parts = [sample_tokens(logits_BV, batch)]
        except Exception:
            parts = [self._sample_row(*row) for row in zip(logits_BV.split(1), batch.sequences, strict=True)]
        log_probs = [log_prob for part in parts for log_prob in part.log_probs_B.tolist()]
        tops = [top for part in parts for top in part.top_tokens()]
        return torch.cat([part.tokens_B for part in parts]), log_probs, tops

    def _sample_row(self, logits_1V: Tensor, sequence: RunningSequence) -> Sampled:
        try:
            batch = SamplingBatch([sequence], device=self._device, vocabulary=self.model.vocabulary)
            return sample_tokens(logits_1V, batch)
        except Exception as error:
            sequence.end_with(error)
            return Sampled(torch.zeros(1, dtype=torch.long, device=self._device), torch.zeros(1))

    def _fail_rows(self, logits_BV: Tensor, log_probs: list[float], batch: SamplingBatch, weight_version: str) -> None:
        """End the sequences whose probabilities are not finite because of their parameters or of weights with NaN."""
        finite_B = logits_BV.isfinite().all(-1).tolist()
        for sequence, log_prob, finite in zip(batch.sequences, log_probs, finite_B, strict=True):
            if not math.isfinite(log_prob) and not sequence.finish:
                sequence.end_with(SettingsError(OVERFLOW) if finite else non_finite_error(weight_version))
        if not all(finite_B):
            self.forget_prefixes()

    def _work(self, prompt: tuple[int, ...]) -> int:
        """Return how many tokens of a prompt must be computed. The last one always is, for its logits."""
        return len(prompt) - (self.tree.matched(prompt[:-1]) if self._is_reusable(prompt) else 0)

    def _is_reusable(self, tokens: tuple[int, ...]) -> bool:
        return len(tokens) <= self.model.reusable_tokens

    def _rows(self, *, changed: bool) -> SamplingBatch:
        """Return the running sequences as a batch. Reuses the last batch unless sequences joined or left."""
        if self._batch is None or changed:
            running = list(self.scheduler.running)
            self._batch = SamplingBatch(running, device=self._device, vocabulary=self.model.vocabulary)
        return self._batch

    def _logits(self, batch: SamplingBatch, admitted: Admitted) -> Tensor:
        """Return logits of the next token, first for running sequences and then for new prompts."""
        decoding = len(batch.sequences) - sum(map(len, admitted.values()))
        rows = decoding if admitted else self.model.padded_rows(decoding)  # else the next slots are not free
        slots = max(len(batch.sequences), rows)
        self._cache.reserve(
            slots=slots,
            tokens=batch.longest_slot,
            used=decoding,
            max_slots=max(self.scheduler.max_running, slots),
            max_tokens=self._max_context,
        )
        logits = [self._admit(admitted, slot=decoding)] if admitted else []
        if decoding:
            self.stats.decode_tokens += decoding
            inputs = Inputs(
                batch.tokens_B[:decoding],
                batch.positions_B[:decoding],
                batch.longest,
                None if batch.offsets_B is None else batch.offsets_B[:decoding],
                shared_spans([sequence.shared for sequence in batch.sequences[:decoding]], device=self._device),
                None if batch.rope_shift_B is None else batch.rope_shift_B[:decoding],
            )
            logits_BV, experts_BLk = self.model.decode(inputs, self._cache, rows=rows)
            logits.insert(0, logits_BV)
            if experts_BLk is not None:
                for sequence, row_1Lk in zip(batch.sequences[:decoding], experts_BLk.cpu().split(1), strict=True):
                    sequence.experts.append(row_1Lk)
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _compute(self, prompts: list[tuple[int, ...]]) -> None:
        """Compute prompts, together with short queued ones: a pass over few tokens costs just as much."""
        if not prompts:
            return
        ahead = self.scheduler.upcoming(prompts, tokens=AHEAD)
        new = prompts + [prompt for prompt in ahead if prompt not in self._prefixes]
        fork_starts = self._compute_forks(new)
        self._prefill(new)
        for prompt in new:
            prefix = self._prefixes[prompt]
            prefix.cached_tokens = fork_starts.pop(prompt[: prefix.cached_tokens], prefix.cached_tokens)

    def _compute_forks(self, prompts: list[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
        """Store states where prompts leave texts of the prefix tree. Return the cached tokens of each common part.

        This costs no more than computing the prompts from earlier states, and later prompts can start there.
        """
        ends = {prompt: self.tree.fork(prompt[:-1]) for prompt in prompts if self._is_reusable(prompt)}
        forks = list(dict.fromkeys(prompt[:end] for prompt, end in ends.items() if end))
        forks = [fork for fork in forks if fork not in self._prefixes]
        if not forks:
            return {}
        self._prefill(forks)
        starts = {fork: self._prefixes[fork].cached_tokens for fork in forks}
        self._drop_prefixes(forks)
        return starts

    def _prefill(self, prompts: list[tuple[int, ...]]) -> None:
        """Compute prompts in one pass, and store them."""
        nodes = [self.tree.match(prompt[:-1]) if self._is_reusable(prompt) else None for prompt in prompts]
        for prompt, prefix in zip(prompts, self.model.prefill(prompts, nodes), strict=True):
            self.stats.prefill_tokens += len(prompt) - prefix.cached_tokens
            self._prefixes[prompt] = prefix
            self.tree.use(prefix.node)
        for prompt in prompts:
            self._store(prompt, self._prefixes[prompt])

    def _store(self, prompt: tuple[int, ...], prefix: Prefix) -> None:
        """Move the computed part of a prompt to the prefix tree if there is room."""
        start, node = prefix.offset, prefix.node
        self.tree.release(node)
        if self._is_reusable(prompt):
            node = self.tree.insert(
                prompt, lambda position: prefix.tail(position - start), prefix.experts_from, lambda: prefix.state
            )
        if node is not None and node.end == len(prompt):
            prefix.node, prefix.keys_values = node, prefix.keys_values[:, :, :, :0]
        if self.scheduler.awaits(prompt):
            prefix.own_storage()
        self.tree.use(prefix.node)

    def _share(self, admitted: Admitted) -> None:
        """Decide what new sequences read from the prefix tree in place. The rest goes to their slots."""
        for prompt, siblings in admitted.items():
            node = self._prefixes[prompt].node
            shared = self.tree.shared(node, len(siblings) + self.scheduler.awaits(prompt))
            for sequence in siblings:
                sequence.shared, sequence.reusable = shared, self._is_reusable(prompt)
                self.tree.use(shared)

    def _admit(self, admitted: Admitted, *, slot: int) -> Tensor:
        """Copy new prompts to the slots of their siblings, starting at `slot`. Return the logits [B, V] after them."""
        logits = []
        for prompt, siblings in admitted.items():
            prefix, offset, count = self._prefixes[prompt], siblings[0].offset, len(siblings)
            for node in [] if prefix.node is None else prefix.node.path(offset):
                self._cache.put(slot, count, node.keys_values, at=node.start - offset)
            self._cache.put(slot, count, prefix.keys_values, at=prefix.offset - offset)
            self._cache.put_state(slot, count, prefix.state)
            slot += count
            logits += [prefix.logits_V] * count
            for i, sequence in enumerate(siblings):
                if (experts_TLk := prefix.experts_from(sum(map(len, sequence.experts)))) is not None:
                    sequence.experts.append(experts_TLk)
                if not sequence.tokens:
                    sequence.cached_tokens = len(prompt) if i or prefix.used else prefix.cached_tokens
            prefix.used = True
        self._drop_prefixes([prompt for prompt in self._prefixes if not self.scheduler.awaits(prompt)])
        return torch.stack(logits)

    def _drop_prefixes(self, prompts: list[tuple[int, ...]]) -> None:
        for prompt in prompts:
            self.tree.release(self._prefixes.pop(prompt).node)

    def _retire(self) -> list[RunningSequence]:
        """Remove finished sequences and close the gaps in the cache."""
        for slot, sequence in enumerate(self.scheduler.running):
            if sequence.finish:
                self._keep(slot, sequence)
        finished, moves = self.scheduler.retire()
        for source, target in moves:
            sequence = self.scheduler.running[target]
            self._cache.move(source, target, tokens=sequence.length - sequence.offset)
        if finished:
            self._batch = None
        return finished

    def _keep(self, slot: int, sequence: RunningSequence) -> None:
        """Store a finished sequence in the prefix tree, except for a last token that was not computed."""
        offset = sequence.offset
        self._release(sequence)
        if sequence.reusable:
            count = int(min(sequence.computed, self.model.reusable_tokens))
            self.tree.insert(
                (*sequence.prompt, *sequence.tokens)[:count],
                lambda start: self._cache.copy(slot, start - offset, count - offset),
                lambda start: sequence.experts_between(start, count),
                lambda: self._cache.state(slot) if count == sequence.computed else None,
            )

    def _release(self, sequence: RunningSequence) -> None:
        self.tree.release(sequence.shared)
        sequence.shared = None

    def forget_prefixes(self) -> None:
        """Discard computed prompts and the prefix tree. Running sequences keep their keys and values."""
        self._drop_prefixes(list(self._prefixes))
        for sequence in self.scheduler.running:
            sequence.reusable = False
        self.tree.clear()

    def retract(self) -> None:
        """Return running sequences to the queue. Their keys and values are recomputed later."""
        self._batch = None
        self.forget_prefixes()
        self._release_all()
        self.scheduler.retract()

    def halve(self) -> bool:
        """Run half as many sequences from now on, because memory ran out. Return False if only one runs.

        They are computed again, in a new cache.
        """
        count = len(self.scheduler.running)
        if count < 2:
            return False
        self.retract()
        self.free()
        self.scheduler.max_running = count // 2
        self.scheduler.max_prefill = max(1, self.scheduler.max_prefill // 2)
        logger.warning(
            f"out of memory in the embedded engine with {count} responses at once. Fewer run from now on."
            f" To avoid this, set engine.max_running_requests = {count // 2}"
        )
        return True

    def clear(self) -> list[RunningSequence]:
        """Drop all sequences in flight and return them."""
        self._batch = None
        self._drop_prefixes(list(self._prefixes))
        self._release_all()
        return self.scheduler.clear()

    def _release_all(self) -> None:
        for sequence in self.scheduler.running:
            self._release(sequence)

    def free(self) -> None:
        """Free the cache memory. No sequence may be running."""
        self._cache = self.model.new_cache()


def non_finite_error(weight_version: str) -> SlimectlError:
    return SlimectlError(
        f"the logits of weight version {weight_version!r} are not finite: training has diverged or the checkpoint "
        f"is damaged. Use an earlier checkpoint."
    )
