"""LoRA adapters on the linear layers of a Hugging Face model.

I inputs · O outputs of a layer · K rank
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from slimectl.architectures.lora import chosen, halves
from slimectl.policies.fsdp.model import decoder_layers
from slimectl.policies.lora import LoraOptions, base_of, initial, read_adapter


class Adapters:
    """Adds A [K, I] and B [O, K] of every adapted layer to the model as parameters."""

    def __init__(self, hf: nn.Module, options: LoraOptions, *, seed: int) -> None:
        """Raises SettingsError if a target matches no linear layer, CheckpointError if `options.load` does not fit."""
        self.options = options
        inside = {module for layer in decoder_layers(hf) for module in layer.modules()}
        layers = {name: m for name, m in hf.named_modules() if isinstance(m, nn.Linear) and m in inside}
        self.layers = set(chosen(layers, options.targets))
        self.initial: dict[str, Tensor] = {}
        """Initial values of the parameters by name: random, or from the adapter to start from."""
        for name in (name for name in layers if name in self.layers):
            self._adapt(layers[name])
            shapes = (options.rank, layers[name].in_features), (layers[name].out_features, options.rank)
            for half, shape in zip(halves(name), shapes, strict=True):
                self.initial[half] = initial(half, shape, seed=seed)
        if options.load is not None:
            base_of(options.load, options, parameter_names=self.initial)
            self.initial |= read_adapter(options.load, {name: tensor.shape for name, tensor in self.initial.items()})

    def _adapt(self, layer: nn.Linear) -> None:
        rank, scale = self.options.rank, self.options.scale
        layer.add_module("lora_A", nn.Linear(layer.in_features, rank, bias=False, device="meta"))
        layer.add_module("lora_B", nn.Linear(rank, layer.out_features, bias=False, device="meta"))

        def add(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            added: Tensor = module.lora_B(module.lora_A(inputs[0]))
            return output + scale * added

        layer.register_forward_hook(add)

    def pair(self, parameter: str) -> tuple[str, str] | None:
        """Return the names of A and B of a weight, or None if it is not adapted."""
        layer = parameter.removesuffix(".weight")
        return halves(layer) if layer in self.layers else None
