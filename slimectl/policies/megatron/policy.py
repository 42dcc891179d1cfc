"""The Megatron-core policy, and critics: the same model with one value per response token instead of a distribution.

T tokens of this context-parallel rank · H hidden width · R response tokens of the pack · U states that predict them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from slimectl.algorithms.distillation import Divergence
from slimectl.architectures.mapping import ParamMapping
from slimectl.policies.checkpoint import VALUE_HEAD, check_value_head, new_trainer_folder, read_tensors, write_float32
from slimectl.policies.lm_head import HeadOptions, TeacherStates, check_same_vocabulary, of_logits
from slimectl.policies.megatron.batch import MicroBatch, laid_out
from slimectl.policies.megatron.head import (
    in_pack,
    response_log_probs,
    response_logits,
    response_top_log_probs,
    shard_of,
    whole,
)
from slimectl.policies.megatron.master_weights import PARAM
from slimectl.policies.megatron.model import PackedGPT
from slimectl.policies.megatron.parameters import HEAD
from slimectl.policies.megatron.trainer import MegatronTrainer
from slimectl.policies.pack_plan import PackPlan
from slimectl.policies.saving import SaveStreams
from slimectl.protocols import NamedTensors, Weights
from slimectl.system.model_files import trainer_folder
from slimectl.types import Loss, Metrics, TopTokens, TrainingSample


class MegatronPolicy(MegatronTrainer):
    """protocols.Policy on mcore's GPTModel."""

    teacher: MegatronPolicy | None = None

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        def finish(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[int, list[float]]]:
            outputs = response_log_probs(hidden, self.last.output_weight, batch, self._head_options())
            return hidden.new_zeros(()), batch.plan.by_row(outputs.logprobs)

        if self.user_functions is not None:
            self.user_functions.before_log_probs(self.chunks)
        return self.of_rows(rows, finish)

    def top_log_probs(self, rows: Sequence[TrainingSample], k: int) -> list[list[TopTokens]]:
        def finish(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[int, list[TopTokens]]]:
            likeliest = response_top_log_probs(hidden, self.last.output_weight, batch, k, self._head_options())
            return hidden.new_zeros(()), batch.plan.top_by_row(*likeliest)

        return self.of_rows(rows, finish)

    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics:
        divergence = getattr(loss, "divergence", None)

        def evaluate(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logits_RV = divergence_R = None
            weight_VH = self.last.output_weight
            if getattr(loss, "needs_logits", False):
                logits_RV = response_logits(
                    hidden, weight_VH, batch,
                    vocab_size=self.architecture.vocab_size, temperature=self.options.temperature,
                )  # fmt: skip
                logprobs_R, entropy_R = of_logits(logits_RV, batch.targets_R, entropy=loss.needs_entropy)
            else:
                options = self._head_options(entropy=loss.needs_entropy, divergence=divergence)
                if divergence is not None and self.teacher is not None:
                    options = replace(options, teacher=self.teacher.states(batch.plan, self.row_multiple))
                logprobs_R, entropy_R, divergence_R = response_log_probs(hidden, weight_VH, batch, options)
            predicted_R = self._predicted_values(batch, hidden)
            if not batch.plan.rows:
                return logprobs_R.sum() + (0.0 if predicted_R is None else predicted_R.sum()), {}
            return loss(batch.plan.token_batch(logprobs_R, entropy_R, predicted_R, logits_RV, divergence_R))

        return self.summed(rows, evaluate)

    def set_teacher(self, teacher: MegatronPolicy) -> None:
        """Compare distributions over the full vocabulary with those of a frozen policy on the same ranks.

        Raises SettingsError for a teacher with another vocabulary.
        """
        check_same_vocabulary(teacher.architecture.vocab_size, self.architecture.vocab_size)
        self.teacher = teacher

    def sleep(self, *, keep_weights: bool = False) -> None:
        super().sleep(keep_weights=keep_weights)
        if self.teacher is not None:
            self.teacher.sleep(keep_weights=keep_weights)

    def states(self, plan: PackPlan, multiple: int) -> TeacherStates:
        """Return the final states of a pack, laid out as the policy's in `multiple` tokens, and this rank's head."""
        [chunk] = self.chunks
        chunk.eval()
        rank = parallel_state.get_context_parallel_rank()
        batch = laid_out(plan, self.layout, rank=rank, device=self.device, multiple=multiple)
        self.memory.wake()
        with torch.no_grad():
            hidden_UH = whole(chunk(batch.tokens_T, batch.sequences))[batch.predictions.sources_U]
        return TeacherStates(hidden_UH, self.last.output_weight.detach(), self.options.temperature)

    def consume_weights(self, consumer: Callable[[NamedTensors], Any]) -> Any:
        return consumer(self.weights())

    def _predicted_values(self, batch: MicroBatch, hidden: Tensor) -> Tensor | None:
        """Return the values [R] of the states before the response tokens, or None without a shared critic."""
        return None

    def _head_options(self, *, entropy: bool = False, divergence: Divergence | None = None) -> HeadOptions:
        shard = shard_of(self.architecture.vocab_size, self.last.output_weight)
        return HeadOptions(self.options.temperature, entropy, shard, divergence)


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

    def _streams(self) -> SaveStreams:
        streams, shapes = super()._streams(), {NAME: torch.Size((1, self._width))}
        head = self.state.tensors([NAME], PARAM)
        streams.add(head, lambda path, t: write_float32(new_trainer_folder(path) / VALUE_HEAD, shapes, t))
        return streams

    def save(self, path: Path) -> None:
        super().save(path)
        if self.megatron.save_format == "torch_dist":
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
