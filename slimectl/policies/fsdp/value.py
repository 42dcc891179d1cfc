"""A critic: the same model with one value per response token instead of a distribution.

R response tokens · H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slimectl.policies.fsdp.layout import PackLayout
from slimectl.policies.fsdp.model import PackedModel
from slimectl.policies.fsdp.trainer import FsdpTrainer
from slimectl.types import Row

HEAD = "score"
"""Module name of the head in transformers' sequence classifiers, [outputs, H]."""


class PackedValues(PackedModel):
    """The root module: values [R] of the states before the response tokens of the pack."""

    def forward(self, layout: PackLayout, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        return values_of(self.hidden(layout), self.hf), None


def values_of(hidden_RH: Tensor, hf: nn.Module) -> Tensor:
    """Value [R] of each hidden state, from the head that `add_head` added."""
    return (hidden_RH.float() @ hf.get_submodule(HEAD).weight.float().t())[:, 0]


def add_head(hf: nn.Module) -> dict[str, Tensor]:
    """Add a value head to a model; returns its initial value by parameter name."""
    width = hf.get_output_embeddings().weight.shape[1]
    hf.add_module(HEAD, nn.Linear(width, 1, bias=False, device="meta"))
    return {f"{HEAD}.weight": torch.zeros(1, width)}


class FsdpCritic(FsdpTrainer):
    """ports.Critic: values on the backbone of `model_dir`, all parameters trained; `options` are those of FsdpTrainer.

    The head starts at zero unless the checkpoint has one. Checkpoints store it as `score.weight`.
    """

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        return self.of_rows(rows)

    def _add_modules(self, hf: nn.Module) -> dict[str, Tensor]:
        return add_head(hf)

    def _wrap_model(self, hf: nn.Module) -> PackedModel:
        return PackedValues(hf)

    def _unused_names(self, hf: nn.Module) -> set[str]:
        """Name of the LM head, unless it is tied to the embedding."""
        head, embedding = hf.get_output_embeddings().weight, hf.get_input_embeddings().weight
        return {name for name, parameter in hf.named_parameters() if parameter is head and head is not embedding}
