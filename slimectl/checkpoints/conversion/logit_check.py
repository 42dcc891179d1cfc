"""Compares the logits of a converted model with the logits of its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimectl.architectures.cards import language_model
from slimectl.architectures.config import Config
from slimectl.checkpoints.conversion.hf_modules import model_class
from slimectl.checkpoints.conversion.reader_check import TOLERANCE, check_reader
from slimectl.checkpoints.conversion.sources import Source
from slimectl.checkpoints.quantization import Dequantized
from slimectl.checkpoints.quantization_config import scheme_of
from slimectl.checkpoints.stored_names import is_quantized
from slimectl.errors import BackendError, CheckpointError, SlimectlError
from slimectl.protocols import Weights


def check_logits(source: Source, staged: Path, result: Weights, to: str, count: int, *, exact: bool) -> dict[str, Any]:
    """Run source and result on `count` tokens in float32. Returns their difference, and the reader of the source.

    If a model cannot be run here, the result has the reason. A quantized result is also loaded by transformers itself.
    Raises CheckpointError if the values are the same but the logits are not, or if transformers reads others.
    """
    tokens = torch.arange(count) * 7919 % int(language_model(source.config).get("vocab_size", 2))
    try:
        expected = _hf_logits(source.reference or source.config, source.weights, tokens)
        actual = (
            _megatron_logits(source, result, tokens) if to == "torch_dist" else _result_logits(staged, result, tokens)
        )
    except Exception as error:
        # An untrusted config can make transformers or mcore raise anything. Values are still verified.
        line = (str(error).strip().splitlines() or [""])[0]
        reason = line if isinstance(error, SlimectlError) else f"{type(error).__name__}: {line}"
        return {"logits": f"not compared ({reason:.300})"}
    difference = (expected - actual).abs().max().item()
    if exact and not difference <= TOLERANCE * expected.abs().max().item():
        raise CheckpointError(
            f"verifying: logits differ by {difference:.3g} although no number was changed. The result was deleted"
        )
    compared = {"logits_max_difference": float(f"{difference:.3g}"), "logits_compared_with": source.reader}
    if to == "hf" and is_quantized(result.forms()):
        compared |= check_reader(staged, result.forms(), tokens, actual)
    return compared


def _result_logits(staged: Path, result: Weights, tokens: Tensor) -> Tensor:
    """Logits of a Hugging Face result with its written config."""
    return _hf_logits(json.loads((staged / "config.json").read_text(encoding="utf-8")), result, tokens)


@torch.no_grad()
def _hf_logits(config: Config, weights: Weights, tokens: Tensor) -> Tensor:
    """Logits [T, V] of transformers' model of that configuration. Quantized weights are dequantized.

    Raises CheckpointError if transformers has none.
    """
    if scheme := scheme_of(config):
        weights = Dequantized(weights, scheme, torch.float32)
    hf_config, kind = model_class(config)
    tensors = {name: weights.get(name) for name in weights.forms()}
    # from_pretrained, because modules of some families store their experts in one tensor and checkpoints do not.
    model = kind.from_pretrained(
        None, config=hf_config, state_dict=tensors, dtype=torch.float32, attn_implementation="eager"
    )
    logits: Tensor = model(tokens[None]).logits[0]
    return logits


@torch.no_grad()
def _megatron_logits(source: Source, result: Weights, tokens: Tensor) -> Tensor:
    """Logits [T, V] of mcore's GPTModel in a single process. Raises BackendError if megatron-core is missing."""
    from slimectl.architectures.parallel import ParallelLayout
    from slimectl.policies.megatron import parallel
    from slimectl.policies.megatron.batch import packed
    from slimectl.policies.megatron.model import build, device
    from slimectl.policies.options import MegatronOptions, TrainerOptions

    model, layout, running = source.needed_model(), ParallelLayout(), torch.distributed.is_initialized()
    parallel.start(layout, seed=0)
    try:
        (gpt,) = build(model.architecture, TrainerOptions(), MegatronOptions())
        state_dict = gpt.state_dict()
        missing = [link.megatron for link in model.links if link.megatron not in state_dict]
        if missing:
            raise BackendError(f"Megatron's model of {model.family.name} is not built here: no {missing[0]}")
        for link in model.links:
            state_dict[link.megatron].copy_(link.to_megatron([result.get(name) for name in link.hf]))
        row = packed([len(tokens)], layout, rank=0, device=device())
        return torch.nn.functional.linear(gpt(tokens.to(device()), row)[:, 0], gpt.output_weight).cpu()
    finally:
        if not running:
            parallel.stop()
