"""Quantized weights: the layouts that engines read, errors within their bounds, and back."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from vision_models import vision_model

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.checkpoints.conversion.logit_check import _hf_logits
from slimectl.checkpoints.conversion.reader_check import check_reader
from slimectl.checkpoints.hf_weights import HFWeights
from slimectl.checkpoints.quantization_config import scheme_of
from slimectl.checkpoints.quantization_schemes import Fp8Blocks, Int4Groups
from slimectl.data.convert_options import ConvertOptions
from slimectl.errors import CheckpointError

ModelDir = Callable[[str], Path]
DEEPSEEK_V3_1 = {
    "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [1, 2], "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
}  # fmt: skip
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_fp8_by_hand():
    # Two blocks of 1 x 2: scales 448/448 and 7/448; 7/2 of the second block is 224 in its units.
    stored = Fp8Blocks(1, 2).quantized(torch.tensor([[448.0, -3.0, 7.0, 3.5]]))
    assert stored["weight_scale_inv"].tolist() == [[1.0, 7 / 448]]
    assert stored["weight"].float().tolist() == [[448.0, -3.0, 448.0, 224.0]]
    assert Fp8Blocks(1, 2).weight(stored, torch.float32).tolist() == [[448.0, -3.0, 7.0, 3.5]]


def test_fp8_errors_stay_within_a_sixteenth_or_the_smallest_step():
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] = 0  # a block of nothing
    scheme = Fp8Blocks(128, 128)
    stored = scheme.quantized(weight)
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == {
        "weight": ((300, 200), torch.float8_e4m3fn), "weight_scale_inv": ((3, 2), torch.float32),
    }  # fmt: skip
    back = scheme.weight(stored, torch.float32)
    scales = stored["weight_scale_inv"].repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16 * 1.0001, scales * 2**-10)).all()
    assert torch.equal(back[:128, :128], weight[:128, :128])
    # What is representable comes back exactly: quantizing once more changes nothing.
    assert torch.equal(scheme.weight(scheme.quantized(back), torch.float32), back)


def test_int4_by_hand():
    """-54880144 is what compressed-tensors 0.18.0 packs -8, -1, 0, 1, 2, 3, 4, 7 into."""
    weight = torch.tensor([[-8.0, -1, 0, 1, 2, 3, 4, 7.0]]) * 0.9375  # largest 7.5: a scale of 1
    stored = Int4Groups(8).quantized(weight)
    assert stored["weight_scale"].tolist() == [[1.0]]
    assert stored["weight_packed"].tolist() == [[-54880144]]
    assert stored["weight_shape"].tolist() == [1, 8]
    assert Int4Groups(8).weight(stored, torch.float32).tolist() == [[-8.0, -1, 0, 1, 2, 3, 4, 7.0]]


@pytest.mark.parametrize("size", [32, 128])
def test_int4_errors_stay_within_half_a_scale(size: int):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    scheme = Int4Groups(size)
    stored = scheme.quantized(weight)
    back = scheme.weight(stored, torch.float32)
    scales = stored["weight_scale"].repeat_interleave(size, 1)
    assert ((back - weight).abs() <= scales * 0.5001).all()
    assert torch.equal(back[0], weight[0])


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"quantize": "fp8", "block": (32, 32)}, ("weight", "weight_scale_inv")),
        ({"quantize": "int4", "group": 32}, ("weight_packed", "weight_scale", "weight_shape")),
    ],
    ids=["fp8", "int4"],
)
def test_checkpoints_are_quantized_and_made_whole_again(
    options: dict, parts: tuple[str, ...], tmp_path: Path, model_dir: ModelDir
):
    source, small = model_dir("qwen3"), tmp_path / "small"
    summary = convert_checkpoint(source, small, ConvertOptions(**options))
    before, stored = load_file(source / "model.safetensors"), load_file(small / "model.safetensors")
    assert summary["parameters"] == sum(tensor.numel() for tensor in before.values())
    linear = {name for name in before if any(f".{part}." in name for part in PROJECTIONS)}
    wanted = {name.removesuffix("weight") + part for name in linear for part in parts}
    assert stored.keys() == wanted | (before.keys() - linear)
    assert all(torch.equal(stored[name], before[name]) for name in before.keys() - linear)
    config = json.loads((small / "config.json").read_text())["quantization_config"]
    assert (config.get("modules_to_not_convert") or config["ignore"]) == ["lm_head"]

    convert_checkpoint(small, tmp_path / "whole", ConvertOptions(dtype="float32", logits=0))
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "whole" / "config.json").read_text())
    assert whole.keys() == before.keys()
    for name in linear:
        # Within half a step of the largest of a block or group: 448 / 16 / 2 for fp8, half of 1 / 7.5 for int4.
        assert (whole[name] - before[name]).abs().max() <= before[name].abs().max() / 15 * 1.01
    convert_checkpoint(small, tmp_path / "torch_dist", ConvertOptions(to="torch_dist", logits=0))
    convert_checkpoint(tmp_path / "torch_dist", tmp_path / "back", ConvertOptions(dtype="float32", logits=0))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], whole[name].bfloat16().float()) for name in linear)


@pytest.mark.parametrize("quantize", ["fp8", "fp8_tensor", "fp8_channel", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_transformers_reads_the_weights_that_were_written(
    family: str, quantize: str, tmp_path: Path, model_dir: ModelDir
):
    """A tied head has no tensor. If its name is missing, transformers builds a quantized layer."""
    if quantize != "fp8":
        pytest.importorskip("compressed_tensors")
    small = tmp_path / "small"
    summary = convert_checkpoint(model_dir(family), small, ConvertOptions(quantize=quantize, group=32, block=(32, 32)))
    config = json.loads((small / "config.json").read_text())["quantization_config"]
    assert "lm_head" in config.get("modules_to_not_convert", config.get("ignore"))
    readings = ["reads the same weights"]
    if family == "qwen3_moe" and quantize != "fp8":  # transformers 5.19 reads these experts
        with_remedy = "in this format. SGLang and vLLM have, or use --quantize fp8)"
        readings += [f"cannot read it (version {transformers.__version__} has no quantized experts {with_remedy}"]
    assert summary["transformers"] in readings


def test_a_result_that_transformers_reads_otherwise_is_refused(tmp_path: Path, model_dir: ModelDir):
    pytest.importorskip("compressed_tensors")
    small = tmp_path / "small"
    convert_checkpoint(model_dir("llama"), small, ConvertOptions(quantize="int4", group=32, logits=0))
    file, tokens = small / "config.json", torch.arange(8)
    config = json.loads(file.read_text())
    weights = HFWeights(small)
    expected = _hf_logits(config, weights, tokens)
    assert check_reader(small, weights.forms(), tokens, expected) == {"transformers": "reads the same weights"}
    with pytest.raises(CheckpointError, match=r"transformers reads other weights than were written \(logits differ by"):
        check_reader(small, weights.forms(), tokens, expected + torch.eye(*expected.shape))
    config["quantization_config"]["ignore"] = []  # the tied head
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="transformers cannot load the result"):
        check_reader(small, weights.forms(), tokens, expected)


def test_blocks_that_transformers_misreads_are_named(tmp_path: Path, model_dir: ModelDir):
    """Of 64 rows, blocks of 48 have 48 and 16. transformers 5.12 to 5.19 divides the rows evenly among the scales."""
    options = ConvertOptions(quantize="fp8", block=(48, 64))
    summary = convert_checkpoint(model_dir("llama"), tmp_path / "small", options)
    assert re.match(
        r"cannot read it \(.*proj.weight is \d+ x \d+, which --block 48 64 does not", summary["transformers"]
    )


def test_layers_that_readers_name_otherwise_are_matched(tmp_path: Path):
    """`visual.` on disk is `model.visual.` in transformers, which would expect quantized layers there."""
    pytest.importorskip("compressed_tensors")
    source, small = vision_model(tmp_path / "hf", "qwen2_5_vl"), tmp_path / "small"
    assert "visual.blocks.0.attn.qkv.weight" in load_file(source / "model.safetensors")
    summary = convert_checkpoint(source, small, ConvertOptions(quantize="fp8_channel"))
    assert summary["transformers"] == "reads the same weights"
    config = json.loads((small / "config.json").read_text())["quantization_config"]
    assert {"lm_head", r"re:(.*\.)?visual\.blocks\.\d+\.attn\.qkv$"} <= set(config["ignore"])


def test_a_vision_tower_stays_in_full_precision(tmp_path: Path):
    source, small = vision_model(tmp_path / "hf", "qwen3_vl"), tmp_path / "small"
    convert_checkpoint(source, small, ConvertOptions(quantize="fp8", block=(8, 8), logits=0))
    before, stored = (load_file(folder / "model.safetensors") for folder in (source, small))
    tower = [name for name in before if ".visual." in name]
    assert tower
    assert all(torch.equal(stored[name], before[name]) for name in tower)
    assert stored["model.language_model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    named = json.loads((small / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.visual.blocks.0.attn.qkv"} <= set(named)
    assert not any("pos_embed" in name or "layers.0." in name for name in named)  # layers alone: positions are a table


def test_quantized_model_stays_as_it_is_unless_told_otherwise(tmp_path: Path, model_dir: ModelDir):
    convert_checkpoint(model_dir("qwen3"), tmp_path / "small", ConvertOptions(quantize="fp8", block=(32, 32), logits=0))
    summary = convert_checkpoint(tmp_path / "small", tmp_path / "again", ConvertOptions(max_shard_bytes=50_000))
    assert summary["logits_max_difference"] == 0
    before = load_file(tmp_path / "small" / "model.safetensors")
    after = {k: v for file in (tmp_path / "again").glob("*.safetensors") for k, v in load_file(file).items()}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "small" / "config.json").read_text()


def test_what_cannot_be_grouped_or_read_is_refused(tmp_path: Path, model_dir: ModelDir):
    with pytest.raises(CheckpointError, match=r"_proj.weight: 64 columns cannot be split into groups of 128"):
        convert_checkpoint(model_dir("qwen3"), tmp_path / "out", ConvertOptions(quantize="int4"))
    convert_checkpoint(model_dir("qwen3"), tmp_path / "small", ConvertOptions(quantize="fp8", block=(32, 32), logits=0))
    file = tmp_path / "small" / "config.json"
    (tmp_path / "small" / "manifest.json").unlink()  # it would refuse the changes
    config = json.loads(file.read_text())
    for method, match in (
        ({"quant_method": "gptq", "bits": 4}, r"quantized as gptq \(plain\) are not supported. Supported: fp8"),
        ({**config["quantization_config"], "weight_block_size": [64, 64]}, "for these blocks"),
    ):
        file.write_text(json.dumps({**config, "quantization_config": method}))
        with pytest.raises(CheckpointError, match=match):
            convert_checkpoint(tmp_path / "small", tmp_path / "out", ConvertOptions(dtype="bfloat16"))
    assert not (tmp_path / "out").exists()


def test_scales_that_are_powers_of_two_by_hand():
    """DeepSeek-V3.1's layout. 500 / 448 is rounded up to a scale of 2, in which 500 is 250, or 256 in 3 bits."""
    scheme = scheme_of({"quantization_config": DEEPSEEK_V3_1})
    assert scheme == Fp8Blocks(1, 2, powers_of_two=True)
    stored = scheme.quantized(torch.tensor([[500.0, -3.0, 448.0, 0.0]]))
    assert stored["weight_scale_inv"].tolist() == [[2.0, 1.0]]
    assert scheme.weight(stored, torch.float32).tolist() == [[512.0, -3.0, 448.0, 0.0]]
    assert scheme.config([]) == DEEPSEEK_V3_1
    whole = {**stored, "weight_scale_inv": stored["weight_scale_inv"].to(torch.float8_e8m0fnu)}
    assert scheme.weight(whole, torch.float32).tolist() == [[512.0, -3.0, 448.0, 0.0]]


def test_fused_experts_are_quantized_one_by_one(tmp_path: Path, model_dir: ModelDir):
    """transformers' names in memory, which some publishers store: engines know quantized experts by their own names."""
    from safetensors.torch import save_file

    separate, fused = model_dir("qwen3_moe"), tmp_path / "fused"
    shutil.copytree(separate, fused)
    tensors = load_file(separate / "model.safetensors")
    prefix = "model.layers.1.mlp.experts."
    parts = {
        kind: [tensors.pop(f"{prefix}{i}.{kind}_proj.weight") for i in range(5)] for kind in ("gate", "up", "down")
    }
    pairs = zip(parts["gate"], parts["up"], strict=True)
    tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    tensors[f"{prefix}down_proj"] = torch.stack(parts["down"])
    save_file(tensors, fused / "model.safetensors", {"format": "pt"})
    options = ConvertOptions(quantize="fp8", block=(32, 32), logits=0)
    for source, name in ((separate, "a"), (fused, "b")):
        convert_checkpoint(source, tmp_path / name, options)
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
