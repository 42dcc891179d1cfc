"""LoRA adapters for every trainer: their computation, their initial values and their files in peft's format.

I inputs · O outputs of a layer · K rank
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from slimectl.architectures.lora import is_adapter, merged
from slimectl.architectures.mapping import Shape
from slimectl.errors import CheckpointError
from slimectl.policies.checkpoint import read_tensors, write_float32
from slimectl.system.model_files import MAX_CONFIG_BYTES, check_file, read_json

FOLDER = "adapter"
"""Subfolder for the adapter. In the folder of the merged weights, transformers would load it as the model."""
CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
PLAIN = {"use_dora": False, "use_rslora": False, "bias": "none", "fan_in_fan_out": False, "alpha_pattern": {},
         "rank_pattern": {}}  # fmt: skip
"""Further options of peft, disabled."""


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """W + alpha / rank B A for the linear layers whose last name is among `targets` (Hu et al. 2021, arXiv:2106.09685).

    `load`: the directory of a peft adapter to start from.
    """

    rank: int
    alpha: float
    targets: Sequence[str]
    load: Path | None = None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def merged(self, weight_OI: Tensor, a_KI: Tensor, b_OK: Tensor) -> Tensor:
        """Merge an adapter into its weight: W + scale B A, in float32."""
        return merged(weight_OI, a_KI, b_OK, self.scale)


def initial(name: str, shape: Sequence[int], *, seed: int) -> Tensor:
    """Return an adapter parameter's initial value: zeros for B, random for A from `seed` and the name only."""
    if name.endswith(".lora_B.weight"):
        return torch.zeros(*shape)
    number = int.from_bytes(blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "little")
    bound = shape[1] ** -0.5
    return torch.empty(*shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(number))


def write_adapter(
    path: Path,
    options: LoraOptions,
    base: Path,
    shapes: Mapping[str, Shape],
    tensors: Iterator[tuple[str, Tensor]],
) -> None:
    """Write everything that was trained to the new directory `path`, in the format of peft's PeftModel."""
    extra_modules = sorted({name.split(".")[0] for name in shapes if not is_adapter(name)})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(options.targets),
        "modules_to_save": extra_modules or None,
        "inference_mode": True,
        **PLAIN,
    }
    path.mkdir()
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    named = ((PREFIX + name, tensor) for name, tensor in tensors)
    write_float32(path / WEIGHTS, {PREFIX + name: shape for name, shape in shapes.items()}, named)


def read_adapter(path: Path, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor]]:
    """Stream the parameters listed in `shapes`, in float32, one at a time. Raises CheckpointError."""
    prefixed_shapes = {PREFIX + name: shape for name, shape in shapes.items()}
    for name, tensor in read_tensors(path / WEIGHTS, prefixed_shapes):
        yield name.removeprefix(PREFIX), tensor.float()


def base_of(path: Path, options: LoraOptions, parameter_names: Collection[str]) -> Path:
    """Return the base model of a peft adapter that matches these options and has only tensors of `parameter_names`.

    Raises CheckpointError for any other adapter, or if `path` is not a peft adapter.
    """
    config = _read_config(path)
    expected = {"r": options.rank, "lora_alpha": options.alpha, "peft_type": "LORA", **PLAIN}
    for key, value in expected.items():
        if (config.get(key) or None) != (value or None) and not (key == "bias" and config.get(key) is None):
            raise CheckpointError(
                f"{path}: {key} is {config.get(key)!r}, expected {value!r}. Set train.lora_rank and train.lora_alpha to"
                " the adapter's own, or merge it with peft first."
            )
    for name in _tensor_names(path / WEIGHTS):
        if name not in parameter_names:
            raise CheckpointError(
                f"{path}: holds {name}, which would not be used. Add its layer to train.lora_targets, or merge the"
                " adapter with peft first."
            )
    return Path(str(config.get("base_model_name_or_path")))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_json(path / CONFIG, max_bytes=MAX_CONFIG_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no {CONFIG}. Give the directory of a peft adapter.") from None


def _tensor_names(file: Path) -> list[str]:
    try:
        check_file(file)
        with safe_open(str(file), framework="pt") as reader:
            return [name.removeprefix(PREFIX) for name in reader.keys()]
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read ({error}). Copy the adapter again.") from error
