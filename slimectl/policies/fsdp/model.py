"""A Hugging Face model as a function from packs to log-probabilities, on one process or sharded by FSDP2.

T input tokens · R response tokens · U states that predict them · H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from slimectl.algorithms.distillation import Divergence
from slimectl.architectures.causal_model import CausalModel
from slimectl.data.images import ImageProcessor
from slimectl.errors import CheckpointError, RecordError
from slimectl.policies.fsdp import attention
from slimectl.policies.fsdp.mixers import PackedMixers
from slimectl.policies.fsdp.own_head import own_log_probs, own_top_log_probs
from slimectl.policies.fsdp.packed_batch import PackedBatch, build_packed_batch
from slimectl.policies.fsdp.vision import decoder_input, decoder_of
from slimectl.policies.lm_head import (
    HeadOptions,
    TeacherStates,
    linear_top_log_probs,
    of_logits,
    predicted_log_probs,
    scaled,
)
from slimectl.policies.pack_plan import PackPlan, Predictions

Processor = Callable[[], ImageProcessor] | None
"""Returns the model's image processor, when the first image is read."""


class Outputs(NamedTuple):
    """Outputs of a root module for the response tokens of a pack, on the inputs of PackPlan.token_batch."""

    values_R: Tensor
    """Log-probabilities, or a critic's values."""
    entropy_R: Tensor | None = None
    predicted_R: Tensor | None = None
    """Values of a policy that is its own critic."""
    logits_RV: Tensor | None = None
    """Logits, for a user's loss that needs them."""
    divergence_R: Tensor | None = None
    """Divergence of the distributions from a teacher's."""
    tokens_RK: Tensor | None = None
    """The likeliest tokens, whose log-probabilities [R, K] are the values. Not for a loss."""


@dataclass(frozen=True)
class Request:
    """What a forward pass of a policy computes in addition to log-probabilities."""

    entropy: bool = False
    logits: bool = False
    divergence: Divergence | None = None
    teacher: TeacherStates | None = None
    """The teacher of a divergence over the full vocabulary."""
    states: bool = False
    """Compute only the hidden states [U, H], instead of log-probabilities."""
    top_k: int | None = None
    """Number of likeliest tokens that are computed in place of each token, and nothing else."""


class TrainedModel(nn.Module):
    """The root module: computes hidden states and what a role makes of them in one forward.

    Under FSDP2 the embedding and the head, tied or not, are gathered only for the root's forward.
    """

    role: Role
    """What the trainer computes from hidden states."""

    def __init__(self, hf: Any, *, obstacle: str = "") -> None:
        """`obstacle`: why the model cannot be packed, or ""."""
        super().__init__()
        self.hf: Any = hf
        self.obstacle = obstacle
        self.temperature = 1.0
        self.causal = CausalModel(hf)

    def batch(
        self, plan: PackPlan, *, dtype: torch.dtype, device: torch.device, processor: Processor | None = None
    ) -> Any:
        """Return the tensors of a pack for `forward`. They have `predictions` and `targets_R`."""
        raise NotImplementedError

    def hidden(self, batch: Any) -> Tensor:
        """Return the hidden states [U, H] that predict the pack's response tokens."""
        raise NotImplementedError

    def check(self, batch: Any) -> None:
        """Raise CheckpointError if the last forward did not compute the pack as intended."""

    def forward(self, batch: Any, request: Request) -> Outputs:
        """Return the role's outputs for the pack's response tokens, with what is requested."""
        if request.states:
            return Outputs(self.hidden(batch))
        return self.role(self, self.hidden(batch), batch, request)

    def log_probs(self, hidden_UH: Tensor, batch: Any, request: Request) -> Outputs:
        """Return the outputs of a policy from the hidden states."""
        predictions: Predictions = batch.predictions
        if request.logits:
            logits_UV = scaled(self.causal.logits(hidden_UH), self.temperature)
            logits_RV = predictions.of_states(logits_UV)
            return Outputs(*of_logits(logits_RV, batch.targets_R, entropy=request.entropy), None, logits_RV)
        if request.top_k is not None:
            return self._likeliest(hidden_UH, predictions, request.top_k)
        options = HeadOptions(self.temperature, request.entropy, divergence=request.divergence, teacher=request.teacher)
        if self.causal.is_plain:
            weight_VH = self.hf.get_output_embeddings().weight
            head = predicted_log_probs(hidden_UH, weight_VH, predictions, options)
        else:
            head = own_log_probs(self.causal, hidden_UH, predictions, options)
        return Outputs(head.logprobs, head.entropy, divergence_R=head.divergence)

    def _likeliest(self, hidden_UH: Tensor, predictions: Predictions, k: int) -> Outputs:
        """Return the k likeliest tokens in place of every response token, and their log-probabilities, [R, K] each."""
        if self.causal.is_plain:
            weight_VH = self.hf.get_output_embeddings().weight
            parts = linear_top_log_probs(hidden_UH, weight_VH, k, HeadOptions(self.temperature))
        else:
            parts = own_top_log_probs(self.causal, hidden_UH, k, temperature=self.temperature)
        tokens_UK, logprobs_UK = parts
        return Outputs(predictions.of_states(logprobs_UK), tokens_RK=predictions.of_states(tokens_UK))


class Role(Protocol):
    """What a trainer computes from hidden states: a policy's outputs, a critic's, or both."""

    def __call__(self, model: TrainedModel, hidden_UH: Tensor, batch: Any, request: Request) -> Outputs: ...


class PackedModel(TrainedModel):
    """Computes the rows of a pack one after the other, without padding, and common first tokens once."""

    def __init__(self, hf: Any) -> None:
        super().__init__(hf)
        is_recomputed = hf.config.get_text_config()._attn_implementation == attention.RECOMPUTED
        self.mixers = PackedMixers(decoder_layers(hf), recompute=is_recomputed)

    def batch(
        self, plan: PackPlan, *, dtype: torch.dtype, device: torch.device, processor: Processor | None = None
    ) -> PackedBatch:
        return build_packed_batch(plan, dtype=dtype, device=device, processor=processor)

    def hidden(self, batch: PackedBatch) -> Tensor:
        decoder, self.mixers.batch = decoder_of(self.hf), batch
        arguments = decoder_input(self.hf, batch.tokens_T, batch.positions_T, batch.images)
        hidden_1TH = decoder(**arguments, use_cache=False, layout=batch).last_hidden_state
        hidden_UH: Tensor = hidden_1TH[0].index_select(0, batch.predictions.sources_U)
        return hidden_UH

    def check(self, batch: PackedBatch) -> None:
        expected = mixing_layers(self.hf)
        if not expected <= batch.mixed_layers:
            raise CheckpointError(
                f"{self.hf.config.model_type}: {len(expected & batch.mixed_layers)} of {len(expected)} layers use the"
                " packed attention. This architecture mixes tokens in another way. Train a model of another"
                " architecture."
            )


ATTENTION = frozenset({"full_attention", "sliding_attention", "attention"})
TOKENWISE = frozenset({"mlp", "moe"})
"""Kinds of layers, as config.json lists them in layer_types."""


def mixing_layers(hf: Any) -> set[int]:
    """Return the layers that mix tokens along the sequence."""
    count = len(decoder_layers(hf))
    kinds = getattr(hf.config.get_text_config(), "layer_types", None) or ()
    return set(range(count)) - {i for i, kind in enumerate(kinds) if kind in TOKENWISE}


@dataclass(frozen=True)
class RopeLimit:
    """The length up to which every row has the same rotary frequencies.

    Beyond it, transformers changes the frequencies of the whole pack according to its longest row.
    """

    kind: str
    tokens: int

    def check(self, plan: PackPlan) -> None:
        """Raise RecordError for a longer row."""
        for i, row, path in zip(plan.members, plan.rows, plan.paths, strict=True):
            if len(path) > self.tokens:
                name = f"row {i}" if row.index is None else f"sample {row.index}"
                raise RecordError(
                    f"{name}: {len(path)} tokens, but the {self.kind} frequencies of this model change beyond"
                    f" {self.tokens}, which fsdp does not train. Set rollout.max_context_len={self.tokens}."
                )


def rope_limit(hf: Any) -> RopeLimit | None:
    """Return the limit of a model whose rotary frequencies depend on the length, or None for other models."""
    config = hf.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    limits = {
        p["rope_type"]: config.max_position_embeddings
        if "dynamic" in p["rope_type"]
        else p["original_max_position_embeddings"]
        for p in by_layer
        if "dynamic" in p["rope_type"] or p["rope_type"] == "longrope"
    }
    return min((RopeLimit(*item) for item in limits.items()), key=lambda limit: limit.tokens, default=None)


def decoder_layers(hf: Any) -> list[nn.Module]:
    """Return the decoder layers: the units of sharding and of recomputation."""
    if isinstance(layers := getattr(decoder_of(hf), "layers", None), nn.ModuleList):
        return list(layers)
    # Other models have them under another name. No list contains more parameters.
    lists = [module for module in hf.modules() if isinstance(module, nn.ModuleList)]
    sizes = {module: sum(parameter.numel() for parameter in module.parameters()) for module in lists}
    return list(max(lists, key=lambda module: sizes[module], default=()))
