"""`slimectl run --smoke`: what is left of a cluster's settings, and the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workshop import Workshop

from slimectl.runtime import smoke
from slimectl.settings import Settings

CLUSTER = """
[model]
path = "/shared/Qwen3-4B"
[train]
backend = "megatron"
dtype = "bfloat16"
global_batch_size = 256
[megatron]
tensor_model_parallel_size = 2
[cluster]
executor = "ray"
actor_num_nodes = 2
actor_num_gpus_per_node = 8
[engine]
backend = "sglang"
[sglang.args]
mem_fraction_static = 0.7
[score]
custom_rm_path = "reward.py:reward"
[rollout]
data = ["prompts.jsonl"]
max_response_len = 14336
n_samples_per_prompt = 8
[eval]
interval = 20
data = { small = "prompts.jsonl" }
[run]
name = "big"
num_rollout = 3000
rollout_batch_size = 32
"""


def test_a_cluster_run_is_tried_here_with_its_own_reward_and_data(workshop: Workshop):
    (workshop.folder / "cluster.toml").write_text(CLUSTER)
    workshop.slimectl(
        "run", "-c", "cluster.toml", "--smoke", "-s", "rollout.max_response_len=6", "-s", "track.plot=false"
    )
    assert "smoke run with a random qwen3 of 2 layers with one token per byte" in workshop.stderr
    for line in (
        "run.num_rollout = 2 (was 3000)",
        'engine.backend = "auto" (was "sglang")',
        "megatron.tensor_model_parallel_size = 1 (was 2)",
        'cluster.executor = "local" (was "ray")',
    ):
        assert line in workshop.stderr
    lines = [line["metrics"] for line in workshop.metrics("big-smoke")]
    assert [line["rollout/step"] for line in lines if "rollout/step" in line] == [1, 2]
    # 4 of the 8 prompts, one response each, of at most 6 tokens: -s goes above --smoke.
    evaluated = next(line for line in lines if "eval/small" in line)
    assert (evaluated["eval/small_samples"], evaluated["eval/small/response_len/max"] <= 6) == (4, True)
    config = json.loads((workshop.folder / "runs/big-smoke-model/config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("qwen3", 2, 64)


@pytest.mark.parametrize(
    ("card", "model_type", "sizes"),
    [
        ("qwen2.5-0.5B", "qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
        ("qwen3-30B-A3B", "qwen3_moe", {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("glm5-744B-A40B", "llama", {"num_hidden_layers": 4}),  # not a family of the embedded engine: the card `tiny`
        ("qwen3-vl-4B", "qwen3_vl", {}),
    ],
)
def test_the_tiny_model_has_the_family_of_the_large_one(
    card: str, model_type: str, sizes: dict[str, int], tmp_path: Path
):
    settings = Settings.model_validate({"model": {"card": card}, "run": {"name": "big", "dir": str(tmp_path)}})
    words = smoke.create_model(settings)
    config = json.loads((tmp_path / "big-smoke-model/config.json").read_text())
    assert (config["model_type"], {key: config[key] for key in sizes}) == (model_type, sizes)
    assert ("does not support glm_moe_dsa" in words) == (model_type == "llama")


def test_a_model_on_this_machine_lends_its_tokenizer(workshop: Workshop, tmp_path: Path):
    path = {"model": {"path": str(workshop.model)}, "run": {"dir": str(tmp_path)}}
    assert "with its own tokenizer" in smoke.create_model(Settings.model_validate(path))
    tiny = tmp_path / "run-smoke-model"
    assert (tiny / "tokenizer.json").read_bytes() == (workshop.model / "tokenizer.json").read_bytes()
    sizes = [json.loads((folder / "config.json").read_text())["vocab_size"] for folder in (tiny, workshop.model)]
    assert sizes[0] == sizes[1]
