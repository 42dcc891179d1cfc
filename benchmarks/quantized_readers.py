"""Who reads the quantized results of `slimectl convert`: a table in Markdown of formats by programs.

    python benchmarks/quantized_readers.py                                    # transformers, in this process
    python benchmarks/quantized_readers.py --programs transformers vllm sglang --models tied moe --formats int4

Servers are those of the Pythons in SLIMECTL_VLLM_PYTHON and SLIMECTL_SGLANG_PYTHON, in float32 or else in bfloat16.
Models are random, of two layers. The reference dequantizes the stored tensors by the definition of their format and
computes in transformers, in float32, with the inputs of quantized layers rounded to fp8 where the format says so. It
shares no code with slimectl. A cell is the mean and the largest difference of the log-probabilities of 47 tokens, or
the error of the program. "source" is how far the model before quantization is from the reference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.checkpoints.create import create_model
from slimectl.data.convert_options import ConvertOptions
from slimectl.engines.sglang.api import SglangApi
from slimectl.engines.sglang.launch import sglang_server
from slimectl.engines.sglang.topology import ServerSpec
from slimectl.engines.supervisor.server_process import ServerOptions
from slimectl.engines.vllm.api import VllmApi
from slimectl.engines.vllm.launch import vllm_server
from slimectl.errors import first_line
from slimectl.system.http import request

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "initializer_range": 0.08,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "untied": {"model_type": "qwen3", "tie_word_embeddings": False},
    "moe": {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "norm_topk_prob": True, "mlp_only_layers": [0],
    },
}  # fmt: skip
FORMATS: dict[str, dict[str, Any]] = {"fp8": {}, "fp8_tensor": {}, "fp8_channel": {}, "int4": {"group": 32}}
TOKENS = [i * 7919 % 259 for i in range(48)]
PROGRAMS = ("transformers", "vllm", "sglang")


def dequantized(folder: Path) -> dict[str, Tensor]:
    """Weights in float32 by the definitions of fp8 in blocks of 128, of compressed-tensors' fp8 and of its int4."""
    stored = load_file(folder / "model.safetensors")
    weights = {}
    for name, tensor in stored.items():
        module, part = name.rsplit(".", 1)
        if part == "weight_packed":
            nibbles = np.stack([(tensor.numpy().view("uint32") >> 4 * i) & 15 for i in range(8)], -1)
            scales = stored[f"{module}.weight_scale"].float()
            numbers = torch.from_numpy(nibbles.astype("float32") - 8).view(*scales.shape, -1)
            weights[f"{module}.weight"] = (numbers * scales[..., None]).flatten(1)
        elif tensor.dtype == torch.float8_e4m3fn:
            scales = stored.get(f"{module}.weight_scale_inv")
            if scales is None:
                weights[name] = tensor.float() * stored[f"{module}.weight_scale"]
            else:
                whole = torch.kron(scales, torch.ones(128, 128))
                weights[name] = tensor.float() * whole[: tensor.shape[0], : tensor.shape[1]]
        elif not part.startswith("weight_"):
            weights[name] = tensor.float()
    return weights


def reference(folder: Path) -> Tensor:
    """Log-probabilities of the tokens by the definition of the folder's format."""
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config", {})
    hf_config = transformers.AutoConfig.for_model(**config)
    kind = transformers.AutoModelForCausalLM._model_mapping[type(hf_config)]
    model = kind.from_pretrained(None, config=hf_config, state_dict=dequantized(folder), dtype=torch.float32)
    inputs = quantization.get("config_groups", {}).get("group_0", {}).get("input_activations")
    kept = [each.removeprefix("re:") for each in quantization.get("ignore", [])]
    for name, module in model.named_modules():
        if inputs and isinstance(module, torch.nn.Linear) and not any(re.fullmatch(each, name) for each in kept):
            module.register_forward_pre_hook(_rounded_by(inputs["strategy"]))
    return log_probs(model)


def _rounded_by(strategy: str) -> Callable[[Any, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """A hook that scales each token, or all tokens, to the largest fp8 number, and rounds to fp8."""

    def rounded(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        magnitude = args[0].abs().amax(-1, keepdim=True) if strategy == "token" else args[0].abs().amax()
        scale = magnitude.clamp(min=1e-12) / 448
        return ((args[0] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale,)

    return rounded


@torch.no_grad()
def log_probs(model: Any) -> Tensor:
    logits = model.eval()(torch.tensor([TOKENS])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def served(program: str, folder: Path, dtype: str) -> Tensor:
    """Log-probabilities from a server that reads the folder."""
    make, api = (vllm_server, VllmApi()) if program == "vllm" else (sglang_server, SglangApi())
    options = ServerOptions(folder / f"{program}.log", dtype=dtype, max_context=128, start_timeout_s=200)
    server = make(ServerSpec(program, folder), options, python=os.environ[f"SLIMECTL_{program.upper()}_PYTHON"])
    try:
        url = server.start()

        async def post(path: str, body: Any) -> Any:
            return (await request("POST", url + path, timeout_s=100, body=body)).body

        (pairs,) = asyncio.run(api.prompt_log_probs(post, [TOKENS], [0]))
        return torch.tensor([value for _, value in pairs])
    finally:
        server.stop()


def cell(program: str, folder: Path, expected: Tensor) -> str:
    error = ""
    for dtype in ("float32", "bfloat16"):
        try:
            if program == "transformers":
                found = log_probs(
                    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
                )
            else:
                found = served(program, folder, dtype)
        except Exception as problem:  # of another program
            error = first_line(problem, 160)
            continue
        difference = (found - expected).abs()
        return f"{difference.mean():.2g}, {difference.max():.2g} ({dtype})"
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=["transformers"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    chosen = parser.parse_args()
    print(f"| model | format | source | {' | '.join(chosen.programs)} |\n|{'---|' * (3 + len(chosen.programs))}")
    with TemporaryDirectory() as scratch:
        for name in chosen.models:
            source = Path(scratch) / name
            create_model(SHAPE | MODELS[name], source, seed=7)
            for kind in chosen.formats:
                folder = source.with_name(f"{name}-{kind}")
                options = ConvertOptions(dtype="bfloat16", quantize=kind, logits=0, **FORMATS[kind])
                convert_checkpoint(source, folder, options)
                expected = reference(folder)
                distance = (reference(source) - expected).abs()
                cells = [f"{distance.mean():.2g}, {distance.max():.2g}"]
                cells += [cell(program, folder, expected) for program in chosen.programs]
                print(f"| {name} | {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
