"""The Megatron-core policy: log-probabilities and gradients of any loss over them.

R response tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from slimectl.policies.lm_head import of_logits
from slimectl.policies.megatron.batch import Batch
from slimectl.policies.megatron.head import response_log_probs, response_logits
from slimectl.policies.megatron.trainer import MegatronTrainer
from slimectl.policies.token_batch import available_columns, response_tokens
from slimectl.protocols import CheckpointFormat, NamedTensors
from slimectl.types import Loss, Metrics, TrainingSample


class MegatronPolicy(MegatronTrainer):
    """protocols.Policy on mcore's GPTModel; `options` are those of MegatronTrainer."""

    def __init__(self, model_dir: Path, checkpoint: CheckpointFormat, *, temperature: float = 1.0, **options: Any):
        super().__init__(model_dir, checkpoint, **options)
        self.temperature = temperature

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        def finish(batch: Batch, hidden: Tensor) -> tuple[Tensor, dict[int, list[float]]]:
            logprobs_R, _ = self._log_probs(batch, hidden, entropy=False)
            return hidden.new_zeros(()), batch.by_row(rows, logprobs_R)

        if self.user_functions is not None:
            self.user_functions.before_log_probs(self.chunks)
        return self.of_rows(rows, finish)

    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics:
        names = available_columns(rows)

        def evaluate(batch: Batch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logits_RV: Tensor | None = None
            if getattr(loss, "needs_logits", False):
                logits_RV = response_logits(hidden, self.last.output_weight, batch, **self._head_options)
                logprobs_R, entropy_R = of_logits(logits_RV, batch.targets_R, entropy=loss.needs_entropy)
            else:
                logprobs_R, entropy_R = self._log_probs(batch, hidden, entropy=loss.needs_entropy)
            predicted_R = self._predicted_values(batch, hidden)
            if not batch.members:
                return logprobs_R.sum() + (0.0 if predicted_R is None else predicted_R.sum()), {}
            tokens = response_tokens(
                rows, names, members=batch.members, row_R=batch.row_R, logprobs_R=logprobs_R, entropy_R=entropy_R,
                predicted_R=predicted_R,
            )  # fmt: skip
            return loss(replace(tokens, logits_T=logits_RV, targets_T=batch.targets_R))

        return self.summed(rows, evaluate)

    def consume_weights(self, consumer: Callable[[NamedTensors], Any]) -> Any:
        return consumer(self.weights())

    def _predicted_values(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        """Values [R] of the states before the response tokens, for a policy with a shared critic; else None."""
        return None

    def _log_probs(self, batch: Batch, hidden: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        return response_log_probs(hidden, self.last.output_weight, batch, entropy=entropy, **self._head_options)

    @property
    def _head_options(self) -> dict[str, Any]:
        return {"vocab_size": self.architecture.vocab_size, "temperature": self.temperature}
