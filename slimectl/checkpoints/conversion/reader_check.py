"""Loads a quantized result with transformers' own reader, and compares its logits with those of the written weights."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimectl.architectures.config import Config, raw_config
from slimectl.checkpoints.conversion.hf_modules import ROUTED_EXPERT, model_class
from slimectl.checkpoints.quantization_config import scheme_of
from slimectl.checkpoints.quantization_schemes import Fp8Blocks
from slimectl.checkpoints.safetensors_io import TensorSpec
from slimectl.errors import CheckpointError, first_line

TOLERANCE = 1e-3
"""Largest difference of logits, relative to their largest magnitude, that float32 rounding can cause."""
READER_TOLERANCE = 2e-2
"""The same for bfloat16, in which transformers 5.19 dequantizes experts. Wrong weights differ by more than a tenth."""


def check_reader(staged: Path, forms: Mapping[str, TensorSpec], tokens: Tensor, expected: Tensor) -> dict[str, str]:
    """Run the model in `staged` as transformers loads it. `expected` are logits [T, V] of its dequantized weights.

    Activations are not quantized, so both are the same numbers. Returns whether transformers reads the model, or why it
    cannot although other programs can. Raises CheckpointError if it fails to load the model for another reason, or
    reads other weights unnoticed.
    """
    config = raw_config(staged)
    try:
        with _quiet():
            logits = _loaded_logits(staged, config["quantization_config"], tokens)
    except ImportError as error:
        return {"transformers": f"not tried ({first_line(error, 300)})"}
    except Exception as error:
        # It has just run the same model with the same numbers, so the quantized layout is what it cannot load.
        problem = f"transformers cannot load the result ({type(error).__name__}: {first_line(error, 300)})"
    else:
        difference = (logits - expected).abs().max().item()
        if difference <= READER_TOLERANCE * expected.abs().max().item():
            return {"transformers": "reads the same weights"}
        problem = f"transformers reads other weights than were written (logits differ by {difference:.3g})"
    if limit := known_limit(config, forms):
        return {"transformers": f"cannot read it ({limit})"}
    raise CheckpointError(f"verifying: {problem}. The result was deleted. Add --logits 0 to convert for other programs")


def known_limit(config: Config, forms: Mapping[str, TensorSpec]) -> str:
    """Return why some versions of transformers cannot read these weights, which SGLang and vLLM can, or ""."""
    from transformers import __version__ as version

    scheme = scheme_of(config)
    if not isinstance(scheme, Fp8Blocks):
        fused = any(ROUTED_EXPERT.search(name) for name in forms)
        reason = (
            f"version {version} has no quantized experts in this format. SGLang and vLLM have, or use --quantize fp8"
        )
        return reason if fused else ""
    for name, ((*sizes,), dtype) in forms.items():
        if dtype == torch.float8_e4m3fn and (sizes[0] % scheme.rows or sizes[1] % scheme.columns):
            return (
                f"{name} is {sizes[0]} x {sizes[1]}, which --block {scheme.rows} {scheme.columns} does not divide. Use"
                " a smaller --block"
            )
    return ""


@torch.no_grad()
def _loaded_logits(folder: Path, quantization: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """Logits [T, V] of the folder's model in float32, with weights that transformers dequantizes."""
    import transformers

    compressed = quantization["quant_method"] == "compressed-tensors"
    as_numbers = (
        transformers.CompressedTensorsConfig(run_compressed=False)
        if compressed
        else transformers.FineGrainedFP8Config(dequantize=True)
    )
    _, kind = model_class(raw_config(folder))
    model, report = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=as_numbers,
        output_loading_info=True,
    )  # fmt: skip
    if missing := report["missing_keys"]:  # a vision tower, for example, takes no part in these logits
        raise CheckpointError(f"no tensor for {min(missing)}")
    model.eval()
    if compressed:
        from compressed_tensors.quantization import disable_quantization

        model.apply(disable_quantization)
    logits: Tensor = model(tokens[None]).logits[0]
    return logits


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars and warnings of the readers. What they read is compared."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(level)
