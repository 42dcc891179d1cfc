"""Trainer checkpoints: optimizer state as one safetensors file of full tensors, streamed tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from slimectl.architectures.mapping import Shape
from slimectl.chats.model_tokens import template_ends, write_end_tokens
from slimectl.chats.tokenizer import has_tokenizer, load_tokenizer
from slimectl.checkpoints import hf
from slimectl.checkpoints.safetensors_io import write_safetensors
from slimectl.errors import CheckpointError, SettingsError
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.protocols import Weights
from slimectl.system.model_files import MAX_CONFIG_BYTES, TRAINER_STATE, check_file, read_json, trainer_folder
from slimectl.system.stdio import logger

OPTIMIZER = "optimizer.safetensors"
TRAINER = "trainer.json"
FORMAT = 1
VALUE_HEAD = "value_head.safetensors"
"""Value head of a policy with a shared critic. It is outside the model folder so that the model loads anywhere."""
MTP_LAYERS = "num_nextn_predict_layers"


class CarriedWeights:
    """Tensors of the initial model that training does not use, such as layers for multi-token prediction.

    They stay in the model's files until a checkpoint copies them.
    """

    def __init__(self, weights: Weights, names: Sequence[str]) -> None:
        self._weights = weights
        # config.json defines this table, but old checkpoints contain it.
        self.names = [name for name in names if not name.endswith("rotary_emb.inv_freq")]

    def get(self, name: str) -> Tensor:
        return self._weights.get(name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.get(name)) for name in self.names)


def new_trainer_folder(model: Path) -> Path:
    """Return the folder of the trainer's state in a model folder that is being written. Create it if needed."""
    folder = model / TRAINER_STATE
    folder.mkdir(exist_ok=True)
    return folder


def write_float32(path: Path, shapes: Mapping[str, Shape], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write a safetensors file of float32 tensors as a stream. `tensors` must come in the order of `shapes`.

    The writer of safetensors needs all tensors at once, which takes twice the memory of the model.
    """
    forms = {name: (tuple(shape), torch.float32) for name, shape in shapes.items()}

    def in_order() -> Iterator[Tensor]:
        for (name, tensor), expected in zip(tensors, shapes, strict=True):
            assert name == expected
            yield tensor.to(torch.float32)

    with path.open("wb") as file:
        write_safetensors(file, forms, in_order())


def check_value_head(path: Path) -> None:
    """Raise CheckpointError if a checkpoint has no value head, which a policy with a shared critic needs."""
    if not (trainer_folder(path) / VALUE_HEAD).exists():
        raise CheckpointError(f'{path}: no {VALUE_HEAD}. This policy was trained with algorithm.critic = "separate".')


def read_tensors(path: Path, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor]]:
    """Stream the tensors listed in `shapes`, one at a time. Raises CheckpointError if one is missing or misshapen."""
    try:
        check_file(path)
        with safe_open(str(path), framework="pt") as file:
            present = set(file.keys())
            for name, shape in shapes.items():
                if name not in present:
                    raise CheckpointError(f"{path}: no tensor for {name}. It was saved for another model.")
                tensor = file.get_tensor(name)
                if tensor.shape != shape:
                    raise CheckpointError(
                        f"{path}: {name} has shape {list(tensor.shape)}, expected {list(shape)}. It was saved for"
                        " another model."
                    )
                yield name, tensor
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Resume from another checkpoint.") from error


def write_trainer(path: Path, **state: Any) -> None:
    """Write trainer.json for the model folder `path`."""
    (new_trainer_folder(path) / TRAINER).write_text(json.dumps({"format": FORMAT, **state}, indent=2) + "\n")


def read_trainer(path: Path) -> dict[str, Any]:
    """Read trainer.json of the model folder `path`. Raises CheckpointError if it is missing or damaged."""
    file = trainer_folder(path) / TRAINER
    try:
        state = read_json(file, max_bytes=MAX_CONFIG_BYTES)
        if state["format"] != FORMAT or int(state["step"]) < 0:
            raise ValueError(f"format {state['format']}, step {state['step']}")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: no {TRAINER}. These are weights without trainer state. Start from them as a model instead."
        ) from error
    except (CheckpointError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: damaged ({error}). Resume from another checkpoint.") from error
    return state


def saved_options(path: Path) -> tuple[int, OptimizerOptions] | None:
    """Return the update count and optimizer options of a checkpoint, or None if another trainer wrote it."""
    with suppress(CheckpointError, KeyError, TypeError, SettingsError):
        state = read_trainer(path)
        return int(state["step"]), OptimizerOptions(**state["optimizer"])
    return None


def copy_companions(source: Path, target: Path, dtype: torch.dtype, carried: CarriedWeights | None = None) -> None:
    """Copy the model's config and tokenizer, and adapt config.json to the weights that were written.

    The weights have `dtype` and are not quantized. They have layers for multi-token prediction only if those are
    `carried`. Tokens with which the chat template ends turns become end tokens of the copy, because the policy was
    trained to end with them.
    """
    hf.copy_companions(source, target)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    if config.pop("quantization_config", None):
        _warn_once(
            f"{source}: the saved weights are not quantized, so config.json is saved without quantization_config"
        )
    if carried is not None and not carried.names and config.get(MTP_LAYERS):
        config[MTP_LAYERS] = 0
        _warn_once(f"{source}: no layers for multi-token prediction, so {MTP_LAYERS} is 0 in the saved config.json")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if ends := _template_ends(source):
        write_end_tokens(target, ends)


@cache
def _template_ends(model: Path) -> list[int]:
    return template_ends(model, load_tokenizer(model)) if has_tokenizer(model) else []


@cache
def _warn_once(message: str) -> None:
    """Log a warning once, although every save would repeat it."""
    logger.warning(message)
