"""transformers' class for a config.json, and which tensors of its checkpoints are weights of linear layers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from slimectl.architectures.config import Config
from slimectl.architectures.config_defaults import STAND_INS
from slimectl.checkpoints.module_tensors import ModuleTensors
from slimectl.errors import CheckpointError

ROUTED_EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the names of tensors that belong to a single routed expert."""


def model_class(config: Config) -> tuple[Any, Any]:
    """Return transformers' configuration and class of a model (with its vision tower), regardless of its quantization.

    Raises CheckpointError if transformers has none.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    plain["model_type"] = STAND_INS.get(plain["model_type"], plain["model_type"])
    try:
        with TemporaryDirectory() as folder:  # it reads infinite numbers from files only
            (Path(folder) / "config.json").write_text(json.dumps(plain), encoding="utf-8")
            hf_config = transformers.AutoConfig.from_pretrained(folder)
        with_vision, text = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM
        auto = with_vision if type(hf_config) in with_vision._model_mapping else text
        return hf_config, auto._model_mapping[type(hf_config)]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"transformers has no model for model_type {config.get('model_type')!r}") from error


def linear_weights(config: Config, stored: Collection[str]) -> frozenset[str]:
    """Return the names of the weights of linear layers, except the head, and of single experts in a checkpoint.

    `stored` are the names in the checkpoint. Raises CheckpointError if transformers does not know the model.
    """
    hf_config, kind = model_class(config)
    with torch.device("meta"):
        model = kind(hf_config)
    tensors = ModuleTensors(model, stored=stored)
    head = model.get_output_embeddings()
    # Routers of some families are subclasses.
    linear = {
        f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear and module is not head
    }
    return frozenset(
        name
        for group in tensors.groups
        for name in group.published
        if linear.issuperset(group.parameters) or ROUTED_EXPERT.search(name)
    )
