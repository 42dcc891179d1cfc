"""Adapts models that a user's provider builds: any GPTModel of megatron-core accepts packs and returns hidden states.

T tokens of a pack · B sequences of it · L length of the longest · H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slimectl.architectures.mapping import ParamMapping
from slimectl.architectures.parallel import ParallelLayout
from slimectl.errors import SettingsError
from slimectl.policies.megatron.batch import PackedSequences
from slimectl.policies.megatron.model import HiddenStateGPT, PackedGPT

SETTING = "megatron.custom_model_provider_path"
MODEL_FIELDS = (
    "params_dtype", "sequence_parallel", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "num_layers", "num_moe_experts",
)  # fmt: skip
"""Fields of TransformerConfig that determine which part of the model a rank builds."""
SCHEDULE_FIELDS = (
    "calculate_per_token_loss", "variable_seq_lengths", "pipeline_dtype", "overlap_p2p_comm", "batch_p2p_comm",
)  # fmt: skip
"""Fields that the trainer sets: gradients are not divided by the number of packs, and packs differ in length."""


class PackedRows(HiddenStateGPT):
    """Calls a GPTModel's forward on one row of packed sequences, in the format of TransformerEngine's attention."""

    def forward(self, tokens_T: Tensor | None, packed: PackedSequences) -> Tensor:
        tokens_1T = None if tokens_T is None else tokens_T[None]
        return super().forward(tokens_1T, packed.positions_T[None], None, packed_seq_params=packed)


class PaddedRows(HiddenStateGPT):
    """Calls a GPTModel's forward with one row per sequence, for attention that cannot read packs."""

    def forward(self, tokens_T: Tensor, packed: PackedSequences) -> Tensor:
        lengths = list(packed.lengths)
        tokens_BL = pad_sequence(list(tokens_T.split(lengths)), batch_first=True)
        positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device).expand_as(tokens_BL)
        masked_LL = torch.ones(2 * tokens_BL.shape[1:], dtype=torch.bool, device=tokens_BL.device).triu(1)
        hidden_LBH = super().forward(tokens_BL, positions_BL, masked_LL[None, None])
        return torch.cat([hidden_LBH[:length, row] for row, length in enumerate(lengths)])[:, None]


def adopted(chunk: GPTModel, expected: Any, layout: ParallelLayout) -> PackedGPT:
    """Return a GPTModel as a chunk of the trainer. `expected` is the TransformerConfig of config.json and settings.

    Raises SettingsError for a model that would not compute what the settings specify.
    """
    reads_packs = not any(isinstance(module, DotProductAttention) for module in chunk.modules())
    if layout.context > 1 or (not reads_packs and (layout.tensor > 1 or layout.pipeline > 1)):
        what = (
            "context parallelism" if layout.context > 1 else "tensor or pipeline parallelism with DotProductAttention"
        )
        raise SettingsError(f"{SETTING}: {what} needs the model that build() makes. Call build(), or turn it off.")
    for name in MODEL_FIELDS:
        actual, stated = getattr(chunk.config, name), getattr(expected, name)
        if actual != stated:
            raise SettingsError(
                f"{SETTING}: the model's config has {name} = {actual}, but config.json and the settings have {stated}. "
                f"Take the argument `config`, which is a TransformerConfig."
            )
    for name in SCHEDULE_FIELDS:
        setattr(chunk.config, name, getattr(expected, name))
    kind = type(chunk)
    chunk.__class__ = type(kind.__name__, (PackedRows if reads_packs else PaddedRows, kind), {})
    return cast(PackedGPT, chunk)


def check_parameters(local: Mapping[str, Tensor], links: Sequence[ParamMapping], layout: ParallelLayout) -> None:
    """Raise SettingsError unless a user's model has exactly the parameters that weights are converted to."""
    shapes = {link.megatron: link.shape for link in links}
    if unknown := sorted(name for name, tensor in local.items() if name not in shapes and _is_trained(tensor)):
        raise SettingsError(
            f"{SETTING}: the model has a parameter {unknown[0]}, which no weight of config.json's family is converted "
            f"to. Name parameters as megatron-core's GPTModel does, or add the family (CONTRIBUTING, recipe 3)."
        )
    if layout.pipeline == 1 and layout.expert == 1 and (absent := sorted(shapes.keys() - local.keys())):
        raise SettingsError(f"{SETTING}: the model has no parameter {absent[0]}, which config.json asks for.")
    if layout.tensor == 1 and layout.expert_tensor == 1:
        for name in sorted(shapes.keys() & local.keys()):
            if tuple(local[name].shape) != shapes[name]:
                raise SettingsError(
                    f"{SETTING}: {name} has shape {list(local[name].shape)}, config.json asks for {list(shapes[name])}."
                )


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)
