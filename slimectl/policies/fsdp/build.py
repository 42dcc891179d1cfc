"""Builds the model of a folder without weights, on the path that it can take: packed, or padded where it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimectl.algorithms.packing import PrefixTrie
from slimectl.architectures.causal_model import OWN_MASKS, check_causal, compute_rows_as_one_chunk
from slimectl.architectures.image_tokens import MODEL_TYPES
from slimectl.checkpoints.causal_config import cannot_build, causal_config
from slimectl.errors import CheckpointError, SettingsError, first_line
from slimectl.policies.fsdp import attention
from slimectl.policies.fsdp.mixers import mixers_of
from slimectl.policies.fsdp.model import ATTENTION, TOKENWISE, PackedModel, TrainedModel, decoder_layers
from slimectl.policies.fsdp.padded_model import PaddedModel
from slimectl.policies.fsdp.vision import decoder_of
from slimectl.policies.pack_plan import plan_pack
from slimectl.policies.recompute import Recompute, recompute_layers, recomputed
from slimectl.types import TrainingSample

_OBSTACLES: dict[tuple[type, str, str], str] = {}
"""Results of trials in this process, by class of the model, attention function and configuration."""


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


def empty_model(model_dir: Path, recompute: Recompute = Recompute()) -> TrainedModel:
    """Build the model of config.json without weights, packed if possible.

    Raises CheckpointError if transformers cannot build it, SettingsError for modules that it does not have.
    """
    attention.register()
    core = recompute.includes("core_attn")
    name = attention.RECOMPUTED if core else attention.NAME
    model: TrainedModel
    try:
        hf = _on_meta(causal_config(model_dir), name)
        obstacle = _unsupported(hf)
        if not obstacle:
            model = PackedModel(hf)
            tried = (type(hf), name, hf.config.to_json_string(use_diff=False))
            obstacle = _OBSTACLES[tried] = _OBSTACLES[tried] if tried in _OBSTACLES else _trial(model)
    except CheckpointError:
        raise
    except Exception as error:  # also for a configuration of which transformers can build no model
        by_name = isinstance(error, KeyError) and name in error.args
        obstacle = "does not accept a custom attention function" if by_name else first_line(error)
    if obstacle:
        model = PaddedModel(_unpacked(model_dir, recomputes=core), obstacle=obstacle)
    hf = model.hf
    check_causal(hf, str(model_dir))
    for module in hf.modules():
        if isinstance(module, nn.Embedding):
            # Padding is never read. In a row this token often ends a turn, so it needs a gradient.
            module.padding_idx = None
    for config in (hf.config, hf.config.get_text_config()):
        config.output_router_logits = False  # the auxiliary loss needs more than the last states
    set_recompute(hf, recompute)
    return model


def _unpacked(model_dir: Path, *, recomputes: bool) -> Any:
    """Build the model with an attention function of transformers, whose core is recomputed in backward if requested."""
    config = causal_config(model_dir)
    name = attention.RECOMPUTED_SDPA if recomputes else None
    if config.model_type in OWN_MASKS:
        name = "eager"
    try:
        return _on_meta(config, name)
    except Exception as error:
        if name != attention.RECOMPUTED_SDPA:
            raise cannot_build(model_dir, error) from error
        _unpacked(model_dir, recomputes=False)  # raises if the model is at fault
        raise SettingsError(
            f"train.recompute_modules: core_attn cannot be recomputed in a {config.model_type} model. Set"
            " train.recompute_granularity=full."
        ) from error


def _on_meta(config: Any, attention_function: str | None) -> Any:
    """Build a model with parameters on the meta device. Without an attention function, transformers chooses one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForCausalLM
    if attention_function is not None:
        config._attn_implementation = attention_function
    if config.model_type in MODEL_TYPES:
        auto, config.vision_config._attn_implementation = AutoModelForImageTextToText, "sdpa"
    with _parameters_on_meta():
        hf = auto.from_config(config, dtype=torch.float32)
    compute_rows_as_one_chunk(hf)
    return hf


def set_recompute(hf: Any, recompute: Recompute) -> None:
    """Recompute activations as `recompute` specifies, in a model that stays in evaluation mode.

    transformers recomputes only in training mode, where dropout and router jitter change log-probabilities.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    hf.eval()
    layers = decoder_layers(hf)
    if recompute.granularity == "full":
        for module in hf.modules():
            if isinstance(module, GradientCheckpointingLayer) or module in layers:
                module.forward = recomputed(module.forward)
    elif recompute.granularity == "selective":
        recompute_layers(layers, recompute)


def _unsupported(hf: Any) -> str:
    """Return the reason why packed training cannot reproduce this model, or "" if it can."""
    config = hf.config.get_text_config()
    head = hf.get_output_embeddings()
    if not (hf._supports_attention_backend or hf._can_set_attn_implementation()):
        return "does not accept a custom attention function"
    if not isinstance(getattr(decoder_of(hf), "layers", None), nn.ModuleList):
        return "has no layers at model.layers"
    kinds = {
        kind
        for layer, kind in zip(decoder_layers(hf), getattr(config, "layer_types", None) or (), strict=False)
        if kind not in ATTENTION | TOKENWISE and not mixers_of(layer)
    }
    if kinds:
        return f"has layers of kind {', '.join(sorted(kinds))}"
    if config.model_type in OWN_MASKS:
        return "makes attention masks of its own"
    return "has no output embeddings" if head is None else ""


def _trial(model: PackedModel) -> str:
    """Return why a packed forward on the meta device fails because of the pack, or "" if it does not.

    A mixture of experts cannot run there, so its trial ends in the first layer that has one.
    """
    rows = [TrainingSample([0] * length, 1, [1.0]) for length in (3, 2)]
    plan = plan_pack(rows, [PrefixTrie((i,), (len(row.tokens) - 1,), (0,)) for i, row in enumerate(rows)])
    buffers = {name: buffer.to("meta") for name, buffer in model.named_buffers()}
    batch = model.batch(plan, dtype=torch.float32, device=torch.device("meta"))
    model.eval()
    try:
        with torch.no_grad(), _replaced(model, buffers):
            model.hidden(batch)
        model.check(batch)
    except CheckpointError as error:
        return str(error).partition(". ")[0]
    except TypeError as error:
        return "does not pass arguments on to its attention function" if "'layout'" in str(error) else ""
    except Exception:  # what does not run on the meta device
        return ""
    return ""


@contextmanager
def _replaced(model: nn.Module, buffers: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the buffers of a model, by name."""
    originals = dict(model.named_buffers())
    try:
        for name in originals:
            _set_buffer(model, name, buffers[name])
        yield
    finally:
        for name, buffer in originals.items():
            _set_buffer(model, name, buffer)


def _set_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    model.get_submodule(owner)._buffers[attribute] = buffer
