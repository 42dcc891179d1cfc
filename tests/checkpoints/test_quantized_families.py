"""Conversions of models that only transformers knows: which layers are quantized, and gpt-oss in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.data.convert_options import ConvertOptions
from slimectl.errors import CheckpointError

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"intermediate_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": EXPERTS,
    "phimoe": EXPERTS,
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    "falcon_h1": {
        "intermediate_size": 32, "mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_n_groups": 1,
        "mamba_d_state": 8,
    },
}  # fmt: skip
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]


def saved(model_type: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE | MODELS[model_type])
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        ("gpt_oss", ATTENTION),  # experts are fused on disk
        ("phimoe", [*ATTENTION, *["w1", "w2", "w3"] * 2]),  # not its router
        ("opt", ["fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"]),  # nor its tables of tokens and positions
        ("falcon_h1", ["down_proj", "gate_proj", "in_proj", *ATTENTION, "out_proj", "up_proj"]),
    ],
)
def test_linear_layers_of_any_model_are_quantized(model_type: str, layers: list[str], tmp_path: Path):
    source, small = saved(model_type, tmp_path / "hf"), tmp_path / "small"
    summary = convert_checkpoint(source, small, ConvertOptions(quantize="fp8", block=(2, 2)))
    found = load_file(small / "model.safetensors")
    quantized = [name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn]
    assert sorted(name.split(".")[-2] for name in quantized) == sorted(layers)
    assert summary["transformers"] == "reads the same weights"
    assert summary["logits_max_difference"] > 0


def test_towers_of_any_model_stay_in_full_precision(tmp_path: Path):
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {**SHAPE, "model_type": "mistral", "intermediate_size": 32}
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "hf")
    summary = convert_checkpoint(tmp_path / "hf", tmp_path / "small", ConvertOptions(quantize="fp8", block=(2, 2)))
    found = load_file(tmp_path / "small" / "model.safetensors")
    quantized = {name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
    prefix = "language_model.model.layers.0."
    attention = {f"{prefix}self_attn.{layer}.weight" for layer in ATTENTION}
    assert quantized == attention | {f"{prefix}mlp.{layer}_proj.weight" for layer in ("gate", "up", "down")}
    assert summary["transformers"] == "reads the same weights"


def test_fused_experts_and_tables_are_named_as_kept(tmp_path: Path):
    """Else transformers on a GPU, SGLang and vLLM would build quantized experts."""
    convert_checkpoint(saved("gpt_oss", tmp_path / "hf"), tmp_path / "small", ConvertOptions(quantize="fp8", logits=0))
    named = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert named["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.router", "model.layers.0.mlp.experts"]


def test_a_model_without_linear_layers_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="--quantize: the model has no linear layers that can be quantized"):
        convert_checkpoint(saved("gpt2", tmp_path / "hf"), tmp_path / "small", ConvertOptions(quantize="fp8"))


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of fp4 (e2m1), by their bits."""


def test_experts_of_gpt_oss_are_dequantized(tmp_path: Path):
    """A loop over the bytes is the reference: the low half of a byte first, and 2 ** (scale - 127) for 32 numbers."""
    source = saved("gpt_oss", tmp_path / "hf", dtype=torch.bfloat16)
    plain, expected = load_file(source / "model.safetensors"), {}
    packed = dict(plain)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in plain if name.endswith(("experts.down_proj", "experts.gate_up_proj"))]:
        E, inputs, rows = packed.pop(name).shape
        blocks = torch.randint(256, (E, rows, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, (E, rows, inputs // 32), generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = [FP4[half] for byte in blocks.flatten().tolist() for half in (byte & 15, byte >> 4)]
        values = torch.tensor(numbers).view(E, rows, inputs // 32, 32) * 2.0 ** (scales.float()[..., None] - 127)
        expected[name] = values.view(E, rows, inputs).transpose(1, 2)
    assert len(expected) == 2
    save_file(packed, source / "model.safetensors", {"format": "pt"})
    file = source / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))

    summary = convert_checkpoint(source, tmp_path / "out", ConvertOptions(dtype="bfloat16"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert summary["logits_max_difference"] == 0
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name].float(), expected.get(name, plain[name]).float()) for name in plain)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
