"""Hugging Face models as policy, and as critic with one value per response token instead of a distribution.

R response tokens · U states that predict them · H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimectl.policies.checkpoint import VALUE_HEAD, check_value_head, new_trainer_folder, read_tensors, write_float32
from slimectl.policies.fsdp.model import Outputs, Request, TrainedModel
from slimectl.policies.fsdp.trainer import FsdpTrainer
from slimectl.policies.pack_plan import PackPlan
from slimectl.policies.saving import SaveStreams
from slimectl.system.model_files import trainer_folder
from slimectl.types import TopTokens, TrainingSample


def log_probs_role(model: TrainedModel, hidden_UH: Tensor, batch: Any, request: Request) -> Outputs:
    """Return log-probabilities of the response tokens."""
    return model.log_probs(hidden_UH, batch, request)


class FsdpPolicy(FsdpTrainer):
    """protocols.Policy on a Hugging Face model."""

    role = staticmethod(log_probs_role)

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return self.of_rows(rows)

    def top_log_probs(self, rows: Sequence[TrainingSample], k: int) -> list[list[TopTokens]]:
        def of_pack(plan: PackPlan) -> dict[int, list[TopTokens]]:
            outputs = self._forward(plan, Request(top_k=k))
            assert outputs.tokens_RK is not None
            return plan.top_by_row(outputs.tokens_RK, outputs.values_R)

        return self.by_row(rows, of_pack)


HEAD = "score"
"""Module name of the head in transformers' sequence classifiers, [outputs, H]."""


def values_role(model: TrainedModel, hidden_UH: Tensor, batch: Any, request: Request) -> Outputs:
    """Return the values [R] of the states before the response tokens."""
    return Outputs(batch.predictions.of_states(values_of(hidden_UH, model.hf)))


def values_of(hidden_UH: Tensor, hf: Any) -> Tensor:
    """Return the value [U] of each hidden state, from the head that `add_head` added."""
    weight_1H: Tensor = hf.get_submodule(HEAD).weight
    return (hidden_UH.float() @ weight_1H.float().t())[:, 0]


def add_head(hf: Any) -> dict[str, Tensor]:
    """Add a value head to a model, and return its initial value by parameter name."""
    width = hf.get_output_embeddings().weight.shape[1]
    hf.add_module(HEAD, nn.Linear(width, 1, bias=False, device="meta"))
    return {f"{HEAD}.weight": torch.zeros(1, width)}


class FsdpCritic(FsdpTrainer):
    """protocols.Critic: values on the backbone of `model_dir`, all parameters trained.

    The head starts at zero unless the checkpoint has one. Checkpoints store it as `score.weight`.
    """

    role = staticmethod(values_role)

    def values(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return self.of_rows(rows)

    def _add_modules(self, hf: nn.Module) -> dict[str, Tensor]:
        return add_head(hf)

    def _unused_names(self, hf: Any) -> set[str]:
        """Return the name of the LM head, unless it is tied to the embedding."""
        head, embedding = hf.get_output_embeddings().weight, hf.get_input_embeddings().weight
        return {name for name, parameter in hf.named_parameters() if parameter is head and head is not embedding}


WEIGHT = f"{HEAD}.weight"


def actor_critic_role(model: TrainedModel, hidden_UH: Tensor, batch: Any, request: Request) -> Outputs:
    """Return log-probabilities of the response tokens, and the values before them."""
    outputs = model.log_probs(hidden_UH, batch, request)
    return outputs._replace(predicted_R=batch.predictions.of_states(values_of(hidden_UH, model.hf)))


class FsdpActorCritic(FsdpPolicy):
    """protocols.Policy with the `values` of protocols.Critic. Losses read the current values as `predicted_T`.

    The head starts at zero unless the checkpoint has one.
    """

    role = staticmethod(actor_critic_role)

    def values(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return self.of_rows(rows, predicted=True)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights without the value head, which engines do not load."""
        return (item for item in super().weights() if item[0] != WEIGHT)

    def _streams(self) -> SaveStreams:
        streams = super()._streams()
        head, shapes = ((WEIGHT, self._full_tensor(name)) for name in (WEIGHT,)), {WEIGHT: self.masters.shapes[WEIGHT]}
        streams.add(head, lambda path, t: write_float32(new_trainer_folder(path) / VALUE_HEAD, shapes, t))
        return streams

    def load(self, path: Path) -> None:
        check_value_head(path)
        super().load(path)
        for _, head in read_tensors(trainer_folder(path) / VALUE_HEAD, {WEIGHT: self.masters.shapes[WEIGHT]}):
            self.masters.assign(head, self.masters.tensors[WEIGHT])
        self.masters.copy_to_model()

    def _add_modules(self, hf: nn.Module) -> dict[str, Tensor]:
        return super()._add_modules(hf) | add_head(hf)
