"""A Hugging Face model as a function from packs to log-probabilities, on one process or sharded by FSDP2.

T input tokens · R response tokens · U states that predict them · H hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimectl.architectures.config import raw_config, read_config
from slimectl.architectures.config_checks import OTHER_MODEL
from slimectl.architectures.image_tokens import MODEL_TYPES
from slimectl.architectures.mapping import Shape, views
from slimectl.architectures.registry import known_family
from slimectl.checkpoints.validate import ValidatedModel
from slimectl.errors import CheckpointError, RecordError, first_line
from slimectl.policies.fsdp import attention
from slimectl.policies.fsdp.packed_batch import PackedBatch
from slimectl.policies.fsdp.vision import decoder_input, decoder_of, tower_of
from slimectl.policies.lm_head import linear_logits, of_logits, predicted_log_probs
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
        weight_VH = self.hf.get_output_embeddings().weight
        if logits:
            logits_UV = linear_logits(hidden_UH, weight_VH, temperature=self.temperature)
            logits_RV = layout.predictions.of_states(logits_UV)
            return Outputs(*of_logits(logits_RV, layout.targets_R, entropy=entropy), None, logits_RV)
        return Outputs(
            *predicted_log_probs(
                hidden_UH, weight_VH, layout.predictions, temperature=self.temperature, entropy=entropy
            )
        )


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
    if head is None or getattr(head, "bias", None) is not None:
        return "has no plain linear head"
    altered = [
        key for key in ("final_logit_softcapping", "logits_scaling", "logit_scale") if getattr(config, key, None)
    ]
    return f"changes its logits ({altered[0]})" if altered else ""


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


@dataclass(frozen=True)
class Slot:
    """Destination of a checkpoint tensor: `full[index]` of a parameter, either the whole or an expert's rows."""

    parameter: str
    index: tuple[int, slice] | EllipsisType = ...


def persistent_buffers(hf: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that checkpoints contain, such as a router's biases, by name."""
    stored = hf.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in hf.named_buffers() if name in stored}


def _carried_patterns(hf: Any) -> list[re.Pattern[str]]:
    """Return patterns for tensors that a model's checkpoints contain but its module does not use."""
    patterns = [r"rotary_emb\.inv_freq$", *(getattr(hf, "_keys_to_ignore_on_load_unexpected", None) or ())]
    config = hf.config.get_text_config().to_dict()
    if (family := known_family(config.get("model_type"))) is not None:
        patterns += family.of(config).carried
    return [re.compile(pattern) for pattern in patterns]


def _remedy(path: Path, name: str) -> str:
    """Return what to do about a tensor that the module lacks. Its family may have it in another layout."""
    has_family = known_family(raw_config(path).get("model_type")) is not None
    if has_family and any(name in link.hf for link in ValidatedModel(read_config(path)).links):
        return "fsdp does not read this layout. Train it with the megatron backend"
    return OTHER_MODEL


class ParameterNames:
    """Maps checkpoint names to parameters and buffers.

    Tied parameters have several names, and experts share parameters: transformers holds the experts of a layer in two
    parameters, but checkpoints have a tensor for each matrix of each expert.
    """

    def __init__(self, hf: Any, *, optional: Collection[str] = ()) -> None:
        """`optional`: parameters that a checkpoint may lack."""
        self.optional = optional
        self.slots: dict[str, Slot] = {}
        """Slots by every name, including aliases and the names of single experts."""
        self.shapes: dict[str, Shape] = {}
        """Shapes of the tensors, by the same names."""
        first: dict[int, str] = {}
        for name, parameter in hf.named_parameters(remove_duplicate=False):
            self.slots[name] = Slot(first.setdefault(id(parameter), name))
            self.shapes[name] = tuple(parameter.shape)
        for name, buffer in persistent_buffers(hf).items():
            self.slots[name], self.shapes[name] = Slot(first.setdefault(id(buffer), name)), tuple(buffer.shape)
        self._published: dict[str, str] = {}
        family = known_family(hf.config.model_type)
        if tower_of(hf) is not None and family is not None:
            self._published = {name: family.published_name(name) for name in self.slots}
        for name, published in self._published.items():
            self.slots[published], self.shapes[published] = self.slots[name], self.shapes[name]
        self.pieces: dict[str, list[str]] = {name: [self._published.get(name, name)] for name in first.values()}
        """Names of a parameter's tensors in a checkpoint: its own name, or one per matrix of each expert."""
        for name, view in views({name: self.shapes[name] for name in first.values()}).items():
            self.slots[name], self.shapes[name] = Slot(view.source, view.index), view.shape
            self.pieces[view.source] = [*(piece for piece in self.pieces[view.source] if piece != view.source), name]
        self._carried = _carried_patterns(hf)
        self.carried: list[str] = []
        """Names of tensors in the loaded checkpoint that the model does not use."""

    @property
    def ties(self) -> Iterator[tuple[str, str]]:
        """Yield (alias, first name) of tied parameters."""
        published = set(self._published.values()) - self._published.keys()
        for alias, slot in self.slots.items():
            if slot.index is ... and slot.parameter != alias and alias not in published:
                yield alias, slot.parameter

    def matched(self, tensors: Iterator[tuple[str, Tensor]], path: Path) -> Iterator[tuple[str, Slot, Tensor]]:
        """Yield (checkpoint name, slot, tensor) of the stream, and check at the end that it is complete.

        Raises CheckpointError.
        """
        loaded: set[str] = set()
        self.carried = []
        for name, tensor in tensors:
            if name not in self.slots:
                if any(pattern.search(name) for pattern in self._carried):
                    self.carried.append(name)
                    continue
                raise CheckpointError(f"{path}: the model has no {name}. {_remedy(path, name)}")
            if tuple(tensor.shape) != self.shapes[name]:
                raise CheckpointError(
                    f"{path}: {name} has shape {list(tensor.shape)}, config.json asks for {list(self.shapes[name])}."
                    " Copy config and weights from the same checkpoint."
                )
            slot = self.slots[name]
            loaded |= {name} if slot.index else {slot.parameter, *self.pieces[slot.parameter]}
            yield name, slot, tensor
        for parameter, pieces in self.pieces.items():
            missing = [name for name in pieces if name not in loaded]
            if missing and parameter not in self.optional:
                raise CheckpointError(
                    f"{path}: no tensor for {missing[0]}. The checkpoint is incomplete. Copy it again."
                )
