"""Low-rank adapters on a model's linear layers, and their files in peft's format.

I inputs · O outputs of a layer · K rank
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimectl.errors import CheckpointError, SettingsError
from slimectl.policies.state import read_tensors, write_float32

FOLDER = "adapter"
"""Beside the merged weights: transformers would take an adapter in the same folder for the model."""
CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
PLAIN = {"use_dora": False, "use_rslora": False, "bias": "none", "fan_in_fan_out": False, "alpha_pattern": {},
         "rank_pattern": {}}  # fmt: skip
"""What peft can do besides, switched off."""


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """W + alpha / rank B A for the linear layers whose last name is among `targets` (Hu et al. 2021, arXiv:2106.09685).

    `load`: a peft adapter's directory to begin from.
    """

    rank: int
    alpha: float
    targets: Sequence[str]
    load: Path | None = None


class Adapters:
    """A [K, I] and B [O, K] of every adapted layer, which become parameters of the model; B begins at zero."""

    def __init__(self, hf: nn.Module, options: LoraOptions, *, seed: int) -> None:
        """Raises SettingsError if a target names no linear layer, CheckpointError if `load` does not fit."""
        self.options, self.scale = options, options.alpha / options.rank
        layers = {
            name: module
            for name, module in hf.named_modules()
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in options.targets
        }
        found = {name.rpartition(".")[2] for name in layers}
        for target in options.targets:
            if target not in found:
                known = sorted({n.rpartition(".")[2] for n, m in hf.named_modules() if isinstance(m, nn.Linear)})
                raise SettingsError(f"train.lora_targets: no linear layer is called {target}; there are {known}")
        self.layers = set(layers)
        self.initial: dict[str, Tensor] = {}
        """What the parameters begin as, by name."""
        draw = torch.Generator().manual_seed(seed)
        for name, layer in layers.items():
            self._adapt(name, layer, draw)
        if options.load is not None:
            check_config(options.load, options)
            shapes = {name: tensor.shape for name, tensor in self.initial.items()}
            self.initial = dict(read_adapter(options.load, shapes))

    def _adapt(self, name: str, layer: nn.Linear, draw: torch.Generator) -> None:
        rank, scale = self.options.rank, self.scale
        layer.add_module("lora_A", nn.Linear(layer.in_features, rank, bias=False, device="meta"))
        layer.add_module("lora_B", nn.Linear(rank, layer.out_features, bias=False, device="meta"))

        def add(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + scale * module.lora_B(module.lora_A(inputs[0]))

        layer.register_forward_hook(add)
        bound = layer.in_features**-0.5
        a_KI = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=draw)
        self.initial[f"{name}.lora_A.weight"] = a_KI
        self.initial[f"{name}.lora_B.weight"] = torch.zeros(layer.out_features, rank)

    def pair(self, parameter: str) -> tuple[str, str] | None:
        """The names of A and B that belong to a weight, where it is adapted."""
        layer = parameter.removesuffix(".weight")
        return (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight") if layer in self.layers else None

    def merged(self, weight_OI: Tensor, a_KI: Tensor, b_OK: Tensor) -> Tensor:
        """What the layer computes as one matrix."""
        return weight_OI + self.scale * (b_OK @ a_KI).to(weight_OI.dtype)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def write_adapter(
    path: Path,
    options: LoraOptions,
    base: Path,
    shapes: Mapping[str, torch.Size],
    tensors: Iterator[tuple[str, Tensor]],
) -> None:
    """Everything that was trained, into the existing directory `path`, as peft's PeftModel takes it."""
    others = sorted({name.split(".")[0] for name in shapes if not is_adapter(name)})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(options.targets),
        "modules_to_save": others or None,
        "inference_mode": True,
        **PLAIN,
    }
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    named = ((PREFIX + name, tensor) for name, tensor in tensors)
    write_float32(path / WEIGHTS, {PREFIX + name: shape for name, shape in shapes.items()}, named)


def read_adapter(path: Path, shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
    """The parameters named in `shapes`, float32, one at a time. Raises CheckpointError."""
    wanted = {PREFIX + name: shape for name, shape in shapes.items()}
    for name, tensor in read_tensors(path / WEIGHTS, wanted):
        yield name.removeprefix(PREFIX), tensor.float()


def adapter_config(path: Path) -> dict[str, Any]:
    """Raises CheckpointError if `path` is no adapter of peft's."""
    try:
        return json.loads((path / CONFIG).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no {CONFIG}; give the directory of a peft adapter") from None
    except ValueError as error:
        raise CheckpointError(f"{path / CONFIG}: damaged ({error}); copy the adapter again") from error


def check_config(path: Path, options: LoraOptions) -> None:
    """Raises CheckpointError if an adapter computes something else than these options do."""
    config = adapter_config(path)
    wanted = {"r": options.rank, "lora_alpha": options.alpha, "peft_type": "LORA", **PLAIN}
    for key, value in wanted.items():
        if (config.get(key) or None) != (value or None) and not (key == "bias" and config.get(key) is None):
            raise CheckpointError(
                f"{path}: {key} is {config.get(key)!r}, expected {value!r}; set train.lora_rank and train.lora_alpha to"
                " the adapter's own, or merge it with peft first"
            )
