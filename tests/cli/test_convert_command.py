"""`slimectl convert` whole: what it says, its exit codes, and what it leaves behind."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from workshop import Workshop

pytestmark = pytest.mark.slow


def left(workshop: Workshop, before: set[str]) -> set[str]:
    return {path.name for path in workshop.folder.iterdir()} - before


def test_there_and_back(workshop: Workshop):
    assert workshop.slimectl("convert", str(workshop.model), "torch", "--to", "torch_dist") == b""
    assert workshop.stderr.startswith(
        "torch: tensors 20, parameters 90624, bytes 362496, dtype as it was, verified True"
    )
    workshop.slimectl("convert", "torch", "back", "--logits", "0")
    assert workshop.stderr == (
        "back: tensors 20, parameters 90624, bytes 362496, dtype as it was, verified True, "
        "source as its manifest says\n"
    )
    found, expected = (load_file(path / "model.safetensors") for path in (workshop.folder / "back", workshop.model))
    assert all((found[name] == expected[name]).all() for name in expected)
    workshop.slimectl("convert", "torch", "back")
    assert workshop.stderr.rstrip().endswith("unchanged True")


def test_quantizing_and_casting_say_how_far_the_logits_moved(workshop: Workshop):
    options = ("--quantize", "fp8", "--block", "32", "32")
    workshop.slimectl("convert", str(workshop.model), "small", *options)
    assert ", dtype fp8, verified True, logits_max_difference " in workshop.stderr
    config = json.loads((workshop.folder / "small" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [32, 32]
    workshop.slimectl("convert", "small", "whole", "--dtype", "bfloat16", "--no-verify")
    assert ", dtype bfloat16, verified False, source as its manifest says\n" in workshop.stderr


def test_mistakes_get_one_line_and_leave_nothing(workshop: Workshop):
    before = {path.name for path in workshop.folder.iterdir()}
    model = str(workshop.model)
    for arguments, code, words in (
        ((model, "out", "--to", "megatron"), 2, "--to megatron: not a layout that can be written. Choose hf or torch_"),
        (
            (model, "out", "--quantize", "int2"),
            2,
            "--quantize int2: not a known value. Known values: fp8, fp8_tensor, fp8_channel, int4",
        ),
        ((model, "out", "--card", "qwen3-0.7b"), 2, "model.card: no card 'qwen3-0.7b'. Did you mean qwen3-1.7B?"),
        ((model, "out", "--card", "qwen3-0.6B"), 1, f"{model}: contradicts the card qwen3-0.6B: model_type is 'llama'"),
        (("nowhere", "out"), 1, "nowhere: no such file or directory. Give a model directory"),
    ):
        workshop.slimectl("convert", *arguments, code=code)
        assert workshop.stderr.startswith(f"slimectl: {words}"), workshop.stderr
        assert workshop.stderr.count("\n") == 1
        assert left(workshop, before) == set()


def test_dry_run_does_nothing(workshop: Workshop):
    before = {path.name for path in workshop.folder.iterdir()}
    out = workshop.slimectl("convert", str(workshop.model), "out", "--to", "torch_dist", "--dry-run")
    assert out.decode() == f"{workshop.model} -> out (torch_dist, unchanged precision)\n"
    assert left(workshop, before) == set()
