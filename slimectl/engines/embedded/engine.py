"""Many prompts in flight in this process: continuous batching on a CPU or one GPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from slimectl.engines.embedded.detokenizer import Detokenizer
from slimectl.engines.embedded.model import Model
from slimectl.engines.embedded.request import requested
from slimectl.engines.embedded.runner import Runner, Stats
from slimectl.engines.embedded.sequence import Sequence as Running
from slimectl.errors import BackendError
from slimectl.types import Completion, SamplingParams


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
        self.max_context = max_context or int(config.max_position_embeddings)
        place = torch.device(device)
        self._model = Model(config, dtype=dtype, device=place)
        self._runner = Runner(self._model, max_running=max_running, max_context=self.max_context, device=place)
        self._detokenizer = Detokenizer(tokenizer)
        self._end_tokens = _ids(config.eos_token_id) | _ids(tokenizer.eos_token_id) | _ids(end_token_ids)
        self._loaded = False
        self._loader_waits = False
        self._lock = threading.RLock()
        self._driver: asyncio.Task[None] | None = None

    @property
    def stats(self) -> Stats:
        return self._runner.stats

    async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
        """Continue `tokens`.

        Raises SettingsError if they leave no room in the context, BackendError while there are no weights.
        """
        sequence = requested(
            tokens,
            params,
            vocabulary=self._model.vocabulary,
            max_context=self.max_context,
            end_tokens=self._end_tokens,
            detokenizer=self._detokenizer,
        )
        with self._lock:
            if not self._loaded:
                raise BackendError("the embedded engine has no weights; call load_weights before generate")
            self._runner.scheduler.add(sequence)
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
            ended = self._runner.clear()
        for sequence in ended:
            sequence.finish = sequence.finish or "abort"
            self._deliver(sequence)

    async def close(self) -> None:
        """Abort, and give back the memory of the cache; the engine may be used again."""
        await self.abort()
        with self._lock:
            self._runner.free()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: str) -> None:
        """Replace weights in place by HF name. Raises CheckpointError on a missing, extra or misshapen tensor.

        Answers in flight go on with the new weights and the keys and values of the old ones.
        """
        self._loader_waits = True
        with self._lock:
            self._loader_waits = self._loaded = False
            self._model.weights.load(tensors)
            self._runner.forget_prefixes()
            self.weight_version = version
            self._loaded = True

    async def _drive(self) -> None:
        """Step while there is work, letting others run between steps."""
        while self._runner.scheduler.has_work():
            try:
                with self._lock:
                    finished = self._step()
            except Exception as error:
                with self._lock:
                    failed = self._runner.clear()
                for sequence in failed:
                    sequence.fail(error)
                return
            for sequence in finished:
                self._deliver(sequence)
            # Locks are not fair: the loop would take this one again before a waiting thread has woken up.
            await asyncio.sleep(0.001 if self._loader_waits else 0)

    def _step(self) -> list[Running]:
        if not self._loaded:
            raise BackendError("the embedded engine has lost its weights to a failed load_weights; load whole ones")
        return self._runner.step(self.weight_version)

    def _deliver(self, sequence: Running) -> None:
        scanner = sequence.scanner
        if scanner is not None and scanner.matched:
            sequence.deliver(scanner.text)
        else:
            sequence.deliver(self._detokenizer.decode(sequence.tokens))


def _ids(ids: int | Sequence[int] | None) -> frozenset[int]:
    """Token ids, given as one, several or none."""
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)
