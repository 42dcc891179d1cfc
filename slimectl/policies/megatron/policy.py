"""The Megatron-core policy, and critics: the same model with one value per response token instead of a distribution.

T tokens of this context-parallel rank · H hidden width · R response tokens of the pack · U states that predict them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from slimectl.architectures.mapping import ParamMapping
from slimectl.policies.checkpoint import VALUE_HEAD, check_value_head, new_trainer_folder, read_tensors, write_float32
from slimectl.policies.lm_head import of_logits
from slimectl.policies.megatron.batch import MicroBatch
from slimectl.policies.megatron.head import in_pack, response_log_probs, response_logits
from slimectl.policies.megatron.master_weights import PARAM
from slimectl.policies.megatron.model import PackedGPT
from slimectl.policies.megatron.parameters import HEAD
from slimectl.policies.megatron.trainer import MegatronTrainer
from slimectl.protocols import NamedTensors, Weights
from slimectl.system.model_files import trainer_folder
from slimectl.types import Loss, Metrics, TrainingSample


class MegatronPolicy(MegatronTrainer):
    """protocols.Policy on mcore's GPTModel."""

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        def finish(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[int, list[float]]]:
            logprobs_R, _ = self._log_probs(batch, hidden, entropy=False)
            return hidden.new_zeros(()), batch.plan.by_row(logprobs_R)

        if self.user_functions is not None:
            self.user_functions.before_log_probs(self.chunks)
        return self.of_rows(rows, finish)

    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics:
        def evaluate(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logits_RV: Tensor | None = None
            if getattr(loss, "needs_logits", False):
                logits_RV = response_logits(hidden, self.last.output_weight, batch, **self._head_options)
                logprobs_R, entropy_R = of_logits(logits_RV, batch.targets_R, entropy=loss.needs_entropy)
            else:
                logprobs_R, entropy_R = self._log_probs(batch, hidden, entropy=loss.needs_entropy)
            predicted_R = self._predicted_values(batch, hidden)
            if not batch.plan.rows:
                return logprobs_R.sum() + (0.0 if predicted_R is None else predicted_R.sum()), {}
            return loss(batch.plan.token_batch(logprobs_R, entropy_R, predicted_R, logits_RV))

        return self.summed(rows, evaluate)

    def consume_weights(self, consumer: Callable[[NamedTensors], Any]) -> Any:
        return consumer(self.weights())

    def _predicted_values(self, batch: MicroBatch, hidden: Tensor) -> Tensor | None:
        """Return the values [R] of the states before the response tokens, or None without a shared critic."""
        return None

    def _log_probs(self, batch: MicroBatch, hidden: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        return response_log_probs(hidden, self.last.output_weight, batch, entropy=entropy, **self._head_options)

    @property
    def _head_options(self) -> dict[str, Any]:
        return {"vocab_size": self.architecture.vocab_size, "temperature": self.options.temperature}


NAME = "score.weight"
"""Name of the head's weight in transformers' sequence classifiers, [outputs, H]."""


class ValueHead(nn.Module):
    """Maps each hidden state to one value. Replicated on every tensor-parallel rank."""

    def __init__(self, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype, device=device))

    def forward(self, hidden_T1H: Tensor, batch: MicroBatch) -> Tensor:
        """Return the values [R] of the state before each response token, at the token that predicts it."""
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            # From here on all ranks compute the same, so each keeps the gradient of its own tokens and none are summed.
            hidden_T1H = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=False)
        hidden_UH = hidden_T1H[:, 0][batch.predictions.sources_U]
        values_U = (hidden_UH.float() @ self.weight.float().t())[:, 0]
        return in_pack(batch.predictions.of_states(values_U), batch)


class WithValueHead(MegatronTrainer):
    """Adds a value head to the backbone of `model_dir`. It starts at zero unless the checkpoint has one."""

    def values(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        """Return one value per response token, without gradients."""

        def finish(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[int, list[float]]]:
            return hidden.new_zeros(()), batch.plan.by_row(self.last.value_head(hidden, batch))

        return self.of_rows(rows, finish)

    @property
    def _width(self) -> int:
        return int(self.architecture.transformer["hidden_size"])

    def _extra_links(self) -> list[ParamMapping]:
        return [ParamMapping("value_head.weight", (NAME,), ((1, self._width),))]

    def _add_modules(self, chunks: Sequence[PackedGPT]) -> None:
        last = chunks[-1]
        if last.post_process:
            last.value_head = ValueHead(self._width, dtype=last.config.params_dtype, device=self.device)

    def _open_weights(self, path: Path) -> Weights:
        return _WithHead(self.checkpoint.open(path), self._width)


class MegatronCritic(WithValueHead):
    """Values on the backbone of `model_dir`, all parameters trained. Checkpoints store the head as `score.weight`."""

    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics:
        """Implement protocols.Policy.forward_backward. The loss reads the differentiable values as `logprobs_T`."""

        def evaluate(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            values_R = self.last.value_head(hidden, batch)
            return loss(batch.plan.token_batch(values_R, None)) if batch.plan.rows else (values_R.sum(), {})

        return self.summed(rows, evaluate)

    def _unused_names(self) -> set[str]:
        return {HEAD}


class _WithHead:
    """Weights of a checkpoint, with a zero value head if it has none."""

    def __init__(self, weights: Weights, width: int) -> None:
        self._weights, self._width = weights, width

    def forms(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {NAME: ((1, self._width), torch.float32), **self._weights.forms()}

    def get(self, name: str) -> Tensor:
        if name == NAME and NAME not in self._weights.forms():
            return torch.zeros(1, self._width)
        return self._weights.get(name)


class WithSeparateValueHead:
    """Weights of a checkpoint, with the value head from a separate file if there is one."""

    def __init__(self, weights: Weights, file: Path) -> None:
        self._weights, self._file = weights, file

    def forms(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._weights.forms()

    def get(self, name: str) -> Tensor:
        if name != NAME or not self._file.exists():
            return self._weights.get(name)
        ((_, head),) = read_tensors(self._file, {NAME: torch.Size(self.forms()[NAME][0])})
        return head


class MegatronActorCritic(WithValueHead, MegatronPolicy):
    """protocols.Policy with the `values` of protocols.Critic. Losses read the current values as `predicted_T`.

    The head starts at zero unless the checkpoint has one. It is saved with the optimizer, as by the FSDP policy.
    """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights without the value head, which engines do not load."""
        return (item for item in super().weights() if item[0] != NAME)

    def save(self, path: Path) -> None:
        with self.memory.awake():
            super().save(path)
            ((_, head),) = self.state.tensors([NAME], PARAM)
            if dist.get_rank() == 0:
                write_float32(new_trainer_folder(path) / VALUE_HEAD, {NAME: head.shape}, iter([(NAME, head)]))
        dist.barrier()

    def load(self, path: Path) -> None:
        check_value_head(path)
        super().load(path)

    def _open_weights(self, path: Path) -> Weights:
        return WithSeparateValueHead(super()._open_weights(path), trainer_folder(path) / VALUE_HEAD)

    def _predicted_values(self, batch: MicroBatch, hidden: Tensor) -> Tensor | None:
        return self.last.value_head(hidden, batch)
