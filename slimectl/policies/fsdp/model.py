"""A Hugging Face model as a function from packs to log-probabilities, on one process or sharded by FSDP2.

T input tokens · R response tokens · U states that predict them · H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimectl.architectures.causal_model import CausalModel
from slimectl.architectures.image_tokens import MODEL_TYPES
from slimectl.architectures.registry import known_family
from slimectl.errors import CheckpointError, RecordError, first_line
from slimectl.policies.fsdp import attention
from slimectl.policies.fsdp.own_head import own_log_probs, scaled
from slimectl.policies.fsdp.packed_batch import PackedBatch
from slimectl.policies.fsdp.vision import decoder_input, decoder_of
from slimectl.policies.lm_head import of_logits, predicted_log_probs
from slimectl.policies.pack_plan import PackPlan
from slimectl.policies.recompute import Recompute, recompute_layers, recomputed


class Outputs(NamedTuple):
    """Outputs of a root module for the response tokens of a pack, on the inputs of PackPlan.token_batch."""

    values_R: Tensor
    """Log-probabilities, or a critic's values."""
    entropy_R: Tensor | None = None
    predicted_R: Tensor | None = None
    """Values of a policy that is its own critic."""
    logits_RV: Tensor | None = None
    """Logits, for a user's loss that needs them."""


class PackedModel(nn.Module):
    """The root module: computes hidden states and log-probabilities in one forward.

    Under FSDP2 the embedding and the head, tied or not, are gathered only for the root's forward.
    """

    def __init__(self, hf: Any, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.hf: Any = hf
        self.temperature = temperature
        self.causal = CausalModel(hf)

    def hidden(self, layout: PackedBatch) -> Tensor:
        """Return the hidden states [U, H] that predict the pack's response tokens."""
        decoder = decoder_of(self.hf)
        arguments = decoder_input(self.hf, layout.tokens_T, layout.positions_T, layout.images)
        hidden_1TH = decoder(**arguments, use_cache=False, layout=layout).last_hidden_state
        hidden_UH: Tensor = hidden_1TH[0].index_select(0, layout.predictions.sources_U)
        return hidden_UH

    def forward(self, layout: PackedBatch, *, entropy: bool, logits: bool = False) -> Outputs:
        """Return log-probabilities of the pack's response tokens, and entropies and logits if requested."""
        return self.log_probs(self.hidden(layout), layout, entropy=entropy, logits=logits)

    def log_probs(self, hidden_UH: Tensor, layout: PackedBatch, *, entropy: bool, logits: bool) -> Outputs:
        """Return the outputs of a policy from the hidden states."""
        if logits:
            logits_UV = scaled(self.causal.logits(hidden_UH), self.temperature)
            logits_RV = layout.predictions.of_states(logits_UV)
            return Outputs(*of_logits(logits_RV, layout.targets_R, entropy=entropy), None, logits_RV)
        options: dict[str, Any] = {"temperature": self.temperature, "entropy": entropy}
        if not self.causal.is_plain:
            return Outputs(*own_log_probs(self.causal, hidden_UH, layout.predictions, **options))
        weight_VH = self.hf.get_output_embeddings().weight
        return Outputs(*predicted_log_probs(hidden_UH, weight_VH, layout.predictions, **options))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Build modules with parameters on the meta device. Their buffers are real."""
    register: Callable[..., None] = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        # A parameter that is already on meta is tied to another module's parameter. It must stay the same object.
        if parameter is not None and not parameter.is_meta:
            empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            # transformers (5) skips parameters with this mark. Otherwise it draws random numbers for them, in Python.
            empty._is_hf_initialized = True  # type: ignore[attr-defined]
            module._parameters[name] = empty

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def empty_model(model_dir: Path, recompute: Recompute = Recompute()) -> nn.Module:
    """Build the model of config.json without weights.

    Raises CheckpointError if packed training does not support it, SettingsError for modules that it does not have.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if not (model_dir / "config.json").is_file():
        raise CheckpointError(f"{model_dir}: no config.json. Give a Hugging Face checkpoint directory.")
    attention.register()
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        config._attn_implementation = attention.RECOMPUTED if recompute.includes("core_attn") else attention.NAME
        auto = AutoModelForCausalLM
        if config.model_type in MODEL_TYPES:
            auto, config.vision_config._attn_implementation = AutoModelForImageTextToText, "sdpa"
        with _parameters_on_meta():
            hf: nn.Module = auto.from_config(config, dtype=torch.float32)
    except Exception as error:
        if isinstance(error, KeyError) and config._attn_implementation in error.args:
            raise _refusal(model_dir, config.model_type, "does not accept a custom attention function") from error
        line = first_line(error)
        raise CheckpointError(
            f"{model_dir}: transformers cannot build this model ({line:.300}). Upgrade transformers,"
            " or give a checkpoint of a known architecture."
        ) from error
    for module in hf.modules():
        if isinstance(module, nn.Embedding):
            # A pack has no padding. This token often ends a turn, so it needs a gradient.
            module.padding_idx = None
    reason = _unsupported(hf)
    if reason:
        raise _refusal(model_dir, config.model_type, reason)
    _set_recompute(hf, recompute)
    return hf


def _refusal(model_dir: Path, model_type: str, reason: str) -> CheckpointError:
    other = "Train a model of another architecture."
    if known_family(model_type) is not None:
        other = "Train it with the megatron backend."
    return CheckpointError(f"{model_dir}: {model_type} {reason}. {other}")


def _set_recompute(hf: Any, recompute: Recompute) -> None:
    """Recompute activations as `recompute` specifies, in a model that stays in evaluation mode.

    transformers recomputes only in training mode, where dropout and router jitter change log-probabilities.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    hf.eval()
    if recompute.granularity == "full":
        for module in hf.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.forward = recomputed(module.forward)
    elif recompute.granularity == "selective":
        recompute_layers(decoder_layers(hf), recompute)


def _unsupported(hf: Any) -> str:
    """Return the reason why packed training cannot reproduce this model, or "" if it can."""
    config = hf.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    head = hf.get_output_embeddings()
    if not kinds <= {"full_attention", "sliding_attention"}:
        return f"has layers of kind {', '.join(sorted(kinds - {'full_attention', 'sliding_attention'}))}"
    if not (hf._supports_attention_backend or hf._can_set_attn_implementation()):
        return "does not accept a custom attention function"
    if not isinstance(getattr(decoder_of(hf), "layers", None), nn.ModuleList):
        return "has no layers at model.layers"
    return "has no output embeddings" if head is None else ""


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


def decoder_layers(hf: Any) -> nn.ModuleList:
    """Return the decoder layers: the units of sharding and of recomputation."""
    layers: nn.ModuleList = decoder_of(hf).layers
    return layers
