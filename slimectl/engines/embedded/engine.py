"""Many prompts in flight in this process: continuous batching on a CPU or one GPU.

B rows.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimectl.engines.embedded.batch import Batch
from slimectl.engines.embedded.detokenizer import Detokenizer
from slimectl.engines.embedded.model import Model, Prefix
from slimectl.engines.embedded.request import requested
from slimectl.engines.embedded.sampler import sampled
from slimectl.engines.embedded.scheduler import Scheduler
from slimectl.engines.embedded.sequence import Sequence as Running
from slimectl.errors import BackendError
from slimectl.types import Completion, SamplingParams


@dataclass(slots=True)
class Stats:
    """What the engine has done since it was made; prompts that siblings share count once."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0


class EmbeddedEngine:
    """Samples text with the weights that `load_weights` brought.

    `max_running` answers are written at once, `max_context` (default: the model's) bounds prompt plus answer. Memory
    for keys and values grows with what runs. `generate` may be called from successive event loops; the one that
    awaits drives the engine. `load_weights` may come from another thread: it waits for the step under way.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_running: int = 64,
        max_context: int | None = None,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self.weight_version = ""
        self.stats = Stats()
        self.max_context = max_context or int(config.max_position_embeddings)
        self._device = torch.device(device)
        self._model = Model(config, dtype=dtype, device=self._device)
        self._cache = self._model.new_cache()
        self._detokenizer = Detokenizer(tokenizer)
        self._scheduler = Scheduler(max_running=max_running)
        self._end_tokens = _ids(config.eos_token_id) | _ids(tokenizer.eos_token_id) | _ids(end_token_ids)
        self._prefixes: dict[tuple[int, ...], Prefix] = {}  # computed prompts that siblings in the queue will use
        self._batch: Batch | None = None  # None: the set of running sequences has changed
        self._loaded = False
        self._loader_waits = False
        self._lock = threading.RLock()
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
        """Continue `tokens`.

        Raises SettingsError if they leave no room in the context, BackendError while there are no weights.
        """
        if not self._loaded:
            raise BackendError("the embedded engine has no weights; call load_weights before generate")
        sequence = requested(
            tokens,
            params,
            vocabulary=self._model.vocabulary,
            max_context=self.max_context,
            end_tokens=self._end_tokens,
            detokenizer=self._detokenizer,
        )
        with self._lock:
            self._scheduler.add(sequence)
        loop = asyncio.get_running_loop()
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._drive())
        try:
            return await sequence.future
        except asyncio.CancelledError:
            sequence.finish = "abort"
            raise

    async def abort(self) -> None:
        """End every request in flight; each returns what it has, with finish "abort"."""
        with self._lock:
            ended = self._forget()
        for sequence in ended:
            sequence.finish = sequence.finish or "abort"
            self._deliver(sequence)

    async def close(self) -> None:
        """Abort, and give back the memory of the cache; the engine may be used again."""
        await self.abort()
        with self._lock:
            self._cache = self._model.new_cache()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: str) -> None:
        """Replace weights in place by HF name. Raises CheckpointError on a missing, extra or misshapen tensor.

        Answers in flight go on with the new weights and the keys and values of the old ones.
        """
        self._loader_waits = True
        with self._lock:
            self._loader_waits = self._loaded = False
            self._model.weights.load(tensors)
            self._prefixes.clear()
            self.weight_version = version
            self._loaded = True

    async def _drive(self) -> None:
        """Step while there is work, letting others run between steps."""
        while self._scheduler.has_work():
            try:
                with self._lock:
                    finished = self._step()
            except Exception as error:
                with self._lock:
                    failed = self._forget()
                for sequence in failed:
                    sequence.fail(error)
                return
            for sequence in finished:
                self._deliver(sequence)
            # Locks are not fair: the loop would take this one again before a waiting thread has woken up.
            await asyncio.sleep(0.001 if self._loader_waits else 0)

    @torch.inference_mode()
    def _step(self) -> list[Running]:
        """One token for every newly admitted sequence, or else for every running one; those that are finished."""
        if not self._loaded:
            raise BackendError("the embedded engine has lost its weights to a failed load_weights; load whole ones")
        admitted = self._scheduler.admit()
        logits_BV, batch = self._prefill(admitted) if admitted else self._decode()
        tokens_B, log_probs_B = sampled(logits_BV, batch)
        for sequence, token, log_prob in zip(batch.sequences, tokens_B.tolist(), log_probs_B.tolist(), strict=True):
            sequence.append(token, log_prob, self.weight_version)
        batch.advance(tokens_B)
        self.stats.steps += 1
        return self._retire()

    def _prefill(self, admitted: dict[tuple[int, ...], list[Running]]) -> tuple[Tensor, Batch]:
        """Compute every new prompt once and give its keys and values to all siblings; logits of their first tokens."""
        new = [prompt for prompt in admitted if prompt not in self._prefixes]
        self._prefixes |= dict(zip(new, self._model.prefill(new), strict=True)) if new else {}
        self.stats.prefill_tokens += sum(map(len, new))
        sequences = [sequence for siblings in admitted.values() for sequence in siblings]
        self._reserve(max(map(len, admitted)))
        slot = len(self._scheduler.running) - len(sequences)
        logits = []
        for prompt, siblings in admitted.items():
            prefix = self._prefixes[prompt]
            self._cache.put(slot, len(siblings), prefix.keys_values)
            slot += len(siblings)
            logits += [prefix.logits_V] * len(siblings)
            for sequence in siblings[prompt in new :]:
                sequence.cached_tokens = len(prompt)
            if not self._scheduler.awaits(prompt):
                del self._prefixes[prompt]
            elif prompt in new:
                self._prefixes[prompt] = prefix.detached()
        batch = Batch(sequences, device=self._device, vocabulary=self._model.vocabulary)
        self._batch = batch if sequences == self._scheduler.running else None
        return torch.stack(logits), batch

    def _decode(self) -> tuple[Tensor, Batch]:
        """Logits of the next token of every running sequence."""
        running = self._scheduler.running
        if self._batch is None:
            self._batch = Batch(list(running), device=self._device, vocabulary=self._model.vocabulary)
        self._reserve(self._batch.longest)
        self.stats.decode_tokens += len(running)
        return self._model.decode(self._batch, self._cache), self._batch

    def _reserve(self, tokens: int) -> None:
        self._cache.reserve(
            slots=len(self._scheduler.running),
            tokens=tokens,
            max_slots=self._scheduler.max_running,
            max_tokens=self.max_context,
        )

    def _retire(self) -> list[Running]:
        """Let finished sequences go and close the gaps that they leave in the cache."""
        finished, sources, targets = self._scheduler.retire()
        if finished:
            self._batch = None
            self._cache.move(
                sources, targets, tokens=max((self._scheduler.running[slot].length for slot in targets), default=0)
            )
        return finished

    def _forget(self) -> list[Running]:
        """Everything in flight, which the engine drops."""
        self._batch = None
        self._prefixes.clear()
        return self._scheduler.clear()

    def _deliver(self, sequence: Running) -> None:
        scanner = sequence.scanner
        if scanner is not None and scanner.matched:
            sequence.deliver(scanner.text)
        else:
            sequence.deliver(self._detokenizer.decode(sequence.tokens))


def _ids(ids: int | Sequence[int] | None) -> frozenset[int]:
    """Token ids, given as one, several or none."""
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
