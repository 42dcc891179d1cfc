"""A Hugging Face model as a function from packs to log-probabilities, on one process or sharded by FSDP2.

T input tokens · R response tokens · H hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimectl.errors import CheckpointError
from slimectl.policies.fsdp import attention
from slimectl.policies.fsdp.packed_batch import PackedBatch
from slimectl.policies.lm_head import linear_log_probs, linear_logits, of_logits


class PackedModel(nn.Module):
    """The root module: hidden states and log-probabilities in one forward.

    One forward, because under FSDP2 the embedding and the head, tied or not, are gathered for the root's forward only.
    """

    def __init__(self, hf: Any, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.hf: Any = hf
        self.temperature = temperature
        self.gives_logits = False
        """Whether logits [R, vocabulary] are returned in place of entropies, for a user's loss that needs them."""

    def hidden(self, layout: PackedBatch) -> Tensor:
        """Hidden states [R, H] that predict the pack's response tokens."""
        hidden_1TH = self.hf.base_model(
            input_ids=layout.tokens_T[None], position_ids=layout.positions_T[None], use_cache=False, layout=layout
        ).last_hidden_state
        hidden_RH: Tensor = hidden_1TH[0].index_select(0, layout.sources_R)
        return hidden_RH

    def forward(self, layout: PackedBatch, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [R] of the pack's response tokens, and their entropies if requested."""
        return self.log_probs(self.hidden(layout), layout, entropy=entropy)

    def log_probs(self, hidden_RH: Tensor, layout: PackedBatch, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [R], and entropies or logits, from the hidden states."""
        weight_VH = self.hf.get_output_embeddings().weight
        if self.gives_logits:
            logits_RV = linear_logits(hidden_RH, weight_VH, temperature=self.temperature)
            return of_logits(logits_RV, layout.targets_R, entropy=False)[0], logits_RV
        return linear_log_probs(hidden_RH, weight_VH, layout.targets_R, temperature=self.temperature, entropy=entropy)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Build modules with parameters on the meta device; their buffers are real."""
    register: Callable[..., None] = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        # A parameter that is on meta already is a tie to another module's: it must stay the same object.
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def empty_model(model_dir: Path) -> nn.Module:
    """Build the model of config.json without weights. Raises CheckpointError if packed training does not support it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (model_dir / "config.json").is_file():
        raise CheckpointError(f"{model_dir}: no config.json; give a Hugging Face checkpoint directory")
    attention.register()
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        config._attn_implementation = attention.NAME
        with _parameters_on_meta():
            hf: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{model_dir}: transformers cannot build this model ({line:.300}); upgrade transformers,"
            " or give a checkpoint of a known architecture"
        ) from error
    reason = _unsupported(hf)
    if reason:
        raise CheckpointError(f"{model_dir}: {config.model_type} {reason}; train it with the megatron backend")
    return hf


def _unsupported(hf: Any) -> str:
    """Reason why packed training cannot reproduce this model; empty if it can."""
    config = hf.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    head = hf.get_output_embeddings()
    if not kinds <= {"full_attention", "sliding_attention"}:
        return f"has layers of kind {', '.join(sorted(kinds - {'full_attention', 'sliding_attention'}))}"
    if not getattr(hf, "_supports_attention_backend", False):
        return "does not take another attention"
    if head is None or getattr(head, "bias", None) is not None:
        return "has no plain linear head"
    altered = [
        key for key in ("final_logit_softcapping", "logits_scaling", "logit_scale") if getattr(config, key, None)
    ]
    return f"changes its logits ({altered[0]})" if altered else ""


def decoder_layers(hf: Any) -> nn.ModuleList:
    """Return the decoder layers: the units of sharding and of recomputation."""
    layers: nn.ModuleList = hf.base_model.layers
    return layers


class ParameterNames:
    """Maps checkpoint names to parameters; tied parameters have several names."""

    def __init__(self, hf: nn.Module, *, optional: Collection[str] = ()) -> None:
        """`optional`: parameters that a checkpoint may lack."""
        self.optional = optional
        self.of_parameter: dict[str, str] = {}
        """First name of the parameter by every name, aliases included."""
        first: dict[int, str] = {}
        for name, parameter in hf.named_parameters(remove_duplicate=False):
            self.of_parameter[name] = first.setdefault(id(parameter), name)
        self.ignored = [re.compile(p) for p in getattr(hf, "_keys_to_ignore_on_load_unexpected", None) or []]
        self.ignored.append(re.compile(r"rotary_emb\.inv_freq$"))

    def matched(
        self, tensors: Iterator[tuple[str, Tensor]], path: Path, shapes: dict[str, torch.Size]
    ) -> Iterator[tuple[str, str, Tensor]]:
        """(checkpoint name, parameter name, tensor) of the stream, checked for completeness at its end.

        Raises CheckpointError.
        """
        loaded: set[str] = set()
        for name, tensor in tensors:
            if name not in self.of_parameter:
                if any(pattern.search(name) for pattern in self.ignored):
                    continue
                raise CheckpointError(
                    f"{path}: the model has no {name}; config.json and weights do not belong together, or the"
                    " architecture stores fused tensors, which the megatron backend trains"
                )
            expected = shapes[self.of_parameter[name]]
            if tensor.shape != expected:
                raise CheckpointError(
                    f"{path}: {name} has shape {list(tensor.shape)}, config.json asks for {list(expected)}; copy config"
                    " and weights from the same checkpoint"
                )
            loaded.add(self.of_parameter[name])
            yield name, self.of_parameter[name], tensor
        missing = [name for name in self.of_parameter.values() if name not in loaded and name not in self.optional]
        if missing:
            raise CheckpointError(f"{path}: no tensor for {missing[0]}; the checkpoint is incomplete, copy it again")
