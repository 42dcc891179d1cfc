"""The Megatron-core policy: log-probabilities and gradients of any loss over them.

R response tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimectl.policies.megatron.batch import Batch
from slimectl.policies.megatron.head import response_log_probs
from slimectl.policies.megatron.trainer import MegatronTrainer
from slimectl.policies.tokens import present, response_tokens
from slimectl.ports import CheckpointFormat, Loss
from slimectl.types import Metrics, Row


class MegatronPolicy(MegatronTrainer):
    """ports.Policy over mcore's GPTModel; `options` are MegatronTrainer's."""

    def __init__(self, model_dir: Path, checkpoint: CheckpointFormat, *, temperature: float = 1.0, **options: Any):
        super().__init__(model_dir, checkpoint, **options)
        self.temperature = temperature

    def log_probs(self, rows: Sequence[Row]) -> list[list[float]]:
        def finish(batch: Batch, hidden: Tensor) -> tuple[Tensor, dict[int, list[float]]]:
            logprobs_R, _ = self._log_probs(batch, hidden, entropy=False)
            values = iter(logprobs_R.tolist())
            found = {i: [next(values) for _ in range(rows[i].response_length)] for i in batch.members}
            return hidden.new_zeros(()), found

        mine = {i: values for part in self.run(rows, finish, forward_only=True) for i, values in part.items()}
        found = {i: values for part in self.from_all_ranks(mine) for i, values in part.items()}
        return [found[i] for i in range(len(rows))]

    def forward_backward(self, rows: Sequence[Row], loss: Loss) -> Metrics:
        names = present(rows)

        def finish(batch: Batch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs_R, entropy_R = self._log_probs(batch, hidden, entropy=loss.needs_entropy)
            if not batch.members:
                return logprobs_R.sum(), {}
            tokens = response_tokens(
                rows, names, members=batch.members, row_R=batch.row_R, logprobs_R=logprobs_R, entropy_R=entropy_R
            )
            value, metrics = loss(tokens)
            return value, {name: part.detach().double() for name, part in {**metrics, "loss": value}.items()}

        sums: dict[str, Tensor] = {"loss": torch.zeros((), dtype=torch.float64, device=self.device)}
        for part in self.run(rows, finish, forward_only=False):
            for name, value in part.items():
                sums[name] = sums.get(name, 0.0) + value
        totals: Metrics = {}
        for part in self.from_all_ranks({name: value.item() for name, value in sums.items()}):
            for name, value in part.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def _log_probs(self, batch: Batch, hidden: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        return response_log_probs(
            hidden,
            self.last.output_weight,
            batch,
            vocab_size=self.architecture.vocab_size,
            temperature=self.temperature,
            entropy=entropy,
        )
