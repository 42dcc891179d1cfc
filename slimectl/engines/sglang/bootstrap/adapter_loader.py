"""SGLang's --custom-weight-loader for LoRA adapters: merges them into the base model on disk (0.5.18 to 0.5.21).

SGLang calls `load` for every message. On a CPU, launch_server.py imports this module. Otherwise SGLang does.
"""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from merged_adapter import Merger

NAME = "adapter_loader.load"
_MERGERS: WeakKeyDictionary[torch.nn.Module, Merger] = WeakKeyDictionary()


def load(model: Any, message: list[tuple[str, torch.Tensor]]) -> None:
    """Load a message: "header" has the bytes of a JSON object, and "bytes" the bytes of the tensors in its table."""
    tensors = dict(message)
    header = json.loads(bytes(tensors["header"].cpu().numpy()))
    merger = _MERGERS.get(model)
    if merger is None:  # updates before this module was imported are unknown
        merger = _MERGERS[model] = Merger(Path(header["own"]), whole=False)
    if header["first"]:
        merger.forget()
    flat = tensors["bytes"].cpu()
    parts = [
        (name, flat[start:end].view(getattr(torch, dtype)).view(shape))
        for name, dtype, shape, start, end in header["tensors"]
    ]
    merged = merger.add(header["adapter"], parts, last=header["last"])
    if header["last"]:
        model.load_weights(merged)
        merger.loaded()


def _observed(update: Any) -> Any:
    """Wrap a WeightUpdater method: errors in `load` become refusals, and other updates invalidate the base model.

    An exception in a custom loader would end SGLang's scheduler (0.5.21). Delete that part when SGLang catches it.
    """

    @functools.wraps(update)
    def observe(self: Any, *args: Any, **options: Any) -> Any:
        if options.get("load_format") == NAME:
            try:
                return update(self, *args, **options)
            except Exception as error:
                return False, str(error)
        if (merger := _MERGERS.get(self.get_model())) is not None:
            merger.whole = False
        return update(self, *args, **options)

    return observe


def _observe_updates() -> None:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for name in ("update_weights_from_disk", "update_weights_from_tensor", "load_weights_from_distributed"):
        setattr(WeightUpdater, name, _observed(getattr(WeightUpdater, name)))


with suppress(ImportError, AttributeError):  # before 0.5.21, these methods are elsewhere
    _observe_updates()
