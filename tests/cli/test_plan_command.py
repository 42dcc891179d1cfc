"""`slimectl plan`: the table, the JSON, the layout it finds, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimectl.architectures import cards
from slimectl.cli.app import app


def plan(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", *words])
    return result.exit_code, result.stdout, result.stderr


def test_every_figure_has_its_formula():
    code, out, err = plan("--card", "qwen3-0.6B", "--tflops", "989", "--concurrency", "64")
    assert code == 0
    figures = [line.split("  ") for line in out.splitlines() if line.startswith("  ")]
    assert len(figures) >= 18
    assert all(cells[-1].strip() for cells in figures)
    assert "parameters per rank" in out
    assert err == "8 ranks: data 8; recompute none; fits in 90% of 80 GiB per GPU\n"


def test_json_has_numbers_with_units():
    code, out, _ = plan("--card", "qwen3-4B", "--tp", "2", "--json")
    made = json.loads(out)
    assert (code, made["fits"], made["run"]["layout"]["tensor"]) == (0, True, 2)
    weights = made["sections"]["training memory"][0]
    assert (weights["name"], weights["unit"]) == ("weights", "bytes")
    # Half of the matrices and of the embedding, all of the norms (36 x (2 x 2560 + 2 x 128) + 2560).
    norms = 36 * (2 * 2560 + 2 * 128) + 2560
    assert weights["value"] == 2 * ((4_022_468_096 - norms) / 2 + norms)


def test_the_layout_is_the_cards_or_the_best_that_fits():
    assert "8 ranks: tensor 4, data 2; recompute none" in plan("--card", "qwen3-14B")[2]
    assert "16 ranks: " in plan("--card", "qwen3-14B", "--gpus", "16")[2]
    assert "recompute full" in plan("--card", "qwen3-14B", "--gpus", "8", "--seq-len", "131072")[2]


RUN = """
[model]
path = "/shared/Qwen3-4B"
[train]
backend = "megatron"
dtype = "bfloat16"
max_tokens_per_gpu = 16384
recompute_granularity = "full"
[megatron]
tensor_model_parallel_size = 2
[cluster]
executor = "ray"
actor_num_nodes = 2
actor_num_gpus_per_node = 4
rollout_num_gpus = 4
rollout_num_gpus_per_engine = 2
[algorithm]
kl_loss_coef = 0.01
[engine]
backend = "sglang"
[sglang.args]
mem_fraction_static = 0.7
[rollout]
data = ["prompts.jsonl"]
max_prompt_len = 2048
max_response_len = 14336
n_samples_per_prompt = 8
[run]
rollout_batch_size = 32
"""
OPTIONS = (
    "--card", "qwen3-4B", "--gpus", "8", "--tp", "2", "--recompute", "full", "--seq-len", "16384",
    "--response-len", "14336", "--max-tokens-per-gpu", "16384", "--batch", "256", "--engine-tp", "2",
    "--mem-fraction", "0.7", "--reference", "--concurrency", "128", "--tflops", "989",
)  # fmt: skip
"""The same run as options: two nodes of four ranks, 32 x 8 rollouts a round and step, on two engines of two GPUs."""


def test_a_settings_file_is_planned_as_the_options_that_describe_it(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    code, out, err = plan("-c", str(file), "--tflops", "989")
    assert (code, out) == plan(*OPTIONS)[:2]
    assert "/shared/Qwen3-4B: not on this machine. Using the card qwen3-4B" in err
    longer = (*OPTIONS[:9], "32768", "--response-len", "30720", *OPTIONS[12:])
    assert plan("-c", str(file), "-s", "rollout.max_response_len=30720", "--tflops", "989")[1] == plan(*longer)[1]
    code, _, err = plan("-c", str(file), "--tp", "4")
    assert (code, "--tp: the settings of the run determine this" in err) == (2, True)
    code, _, err = plan("-s", "model.path=/shared/mine")
    assert (code, "/shared/mine: no such model directory" in err, "--card NAME" in err) == (2, True, True)


def test_a_directory_is_planned_for_like_its_card(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(cards.load("qwen3-0.6B")["config"]))
    assert plan("--model", str(tmp_path))[1] == plan("--card", "qwen3-0.6B")[1]


def test_the_backend_has_an_old_name_that_help_does_not_show():
    words = ("--card", "qwen3-8B", "--gpus", "8", "--recompute", "full")
    assert plan(*words, "--policy", "fsdp") == plan(*words, "--backend", "fsdp")
    assert "--policy" not in plan("--help")[1]


def test_what_stands_beside_the_policy_is_counted_and_adapters_make_it_fit():
    alone = ("--card", "qwen3-8B", "--gpus", "1", "--backend", "fsdp", "--recompute", "full")
    assert plan(*alone)[0] == 1
    code, out, err = plan(*alone, "--lora-rank", "32", "--reference", "--critic", "--teacher", "qwen3-4B")
    assert (code, err) == (0, "1 rank: fsdp; recompute full; fits in 90% of 80 GiB per GPU\n")
    beside = [
        line.split("  ")[1] for line in out.splitlines() if line.startswith(("  critic", "  reference", "  teacher"))
    ]
    assert beside == ["critic weights", "critic optimizer", "critic gradients", "reference weights", "teacher weights"]
    assert "of the frozen model" in out


def test_experts_and_the_modules_to_recompute_are_counted_under_fsdp():
    words = ("--card", "qwen3-30B-A3B", "--gpus", "16", "--backend", "fsdp", "--seq-len", "4096")
    code, out, err = plan(*words, "--recompute", "selective", "--recompute-module", "moe", "--recompute-module", "mlp")
    assert (code, err) == (0, "16 ranks: fsdp; recompute moe, mlp; fits in 90% of 80 GiB per GPU\n")
    assert "router" not in out
    code, out, _ = plan(*words)
    assert (code, "MLPs of experts 4ckF 49,152" in out) == (1, True)


def test_images_are_counted_where_their_tower_is_frozen_and_where_it_is_trained():
    words = ("--card", "tiny-vl", "--backend", "fsdp", "--gpus", "1", "--seq-len", "512", "--images", "1")
    frozen, trained = (" ".join(plan(*words, *more)[1].split()) for more in ((), ("--train-vision-tower",)))
    assert "vision 206,656" in frozen
    assert "667,712 - 206,656 of the frozen vision tower" in frozen
    # Forward multiplies once, backward twice more where weights are trained; 256 tokens are 1,024 patches.
    assert "FLOPs per image 544 MFLOP 2 x (1,024 patches x 108 k + 256 tokens x 98.7 k" in frozen
    assert "FLOPs per image 1.63 GFLOP 6 x (1,024 patches" in trained
    assert "x (pixels c W 768) bytes" in frozen
    assert "x (pixels c W 768 + 2 blocks x " in trained


def test_a_layout_that_does_not_fit_is_shown_all_the_same():
    code, out, err = plan("--card", "qwen3-32B", "--tp", "8")
    assert (code, "peak per rank" in out) == (1, True)
    assert err.startswith("8 ranks: tensor 8, data 1; recompute none; does not fit")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--card", "qwen3-8B", "--tp", "3"], "megatron.tensor_model_parallel_size: 3 does not divide 32 attention"),
        (["--card", "qwen3-8B", "--pp", "8"], "megatron.pipeline_model_parallel_size: 8 does not divide 36 layers"),
        (["--card", "deepseek-v3"], "--gpus 8: no layout fits 90% of 80 GiB per GPU"),
        (
            ["--card", "qwen3-8B", "--recompute-module", "mlp"],
            "--recompute-module: has no effect without --recompute",
        ),
        (
            ["--card", "qwen3-8B", "--recompute", "selective", "--recompute-module", "norm"],
            "--recompute-module norm: must be one of core_attn, mlp, moe",
        ),
        (["--card", "qwen3-8B", "--backend", "fsdp", "--tp", "2"], "--backend fsdp: does not support parallel sizes"),
        (["--card", "qwen3-8c"], "model.card: no card 'qwen3-8c'. Did you mean qwen3-8B?"),
        (
            ["--model", "Llama 3 8B"],
            "Llama 3 8B: no such model directory. For the card of this model: --card llama3-8B",
        ),
        (["--card", "qwen3-8B", "--lora-rank", "8", "--lora-target", "qkv"], "train.lora_targets: no linear layer is"),
        (
            ["--card", "qwen3-8B", "--lora-target", "q_proj"],
            "--lora-target: has no effect without adapters. Add --lora-rank",
        ),
        (["--card", "tiny-vl"], "--backend megatron: cannot train a vision model. Add --backend fsdp"),
        (["--card", "qwen3-4B", "--images", "1"], "--images: this model does not support images"),
        (["--card", "tiny-vl", "--backend", "fsdp", "--image-tokens", "64"], "--image-tokens: has no effect without"),
        (["--card", "tiny-vl", "--backend", "fsdp", "--simulate"], "--simulate: cannot simulate a vision tower"),
        (
            ["--card", "tiny-vl", "--backend", "fsdp", "--images", "9", "--seq-len", "512"],
            "--image-tokens 256: 9 images of this size need more than the 512 tokens of a sequence. Raise --seq-len",
        ),
        (
            ["--card", "tiny-vl", "--backend", "fsdp", "--lora-rank", "8", "--train-vision-tower"],
            "--train-vision-tower: with --lora-rank, only adapters of the decoder are trained",
        ),
        ([], "plan: no model given. Add --card NAME or --model DIR"),
    ],
)
def test_what_cannot_be_planned_is_one_line(words: list[str], message: str):
    code, out, err = plan(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"slimectl: {message}")


def test_a_model_of_another_family_is_planned_by_its_module(tmp_path: Path):
    config = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--model", str(tmp_path), "--gpus", "1", "--seq-len", "64")
    code, out, err = plan(*words, "--backend", "fsdp")
    assert code == 0
    # 64 x 32 tokens, 64 x 32 positions, and in each layer 12 x 32^2 weights, 9 x 32 biases and 4 x 32 of two norms.
    total = 2 * 64 * 32 + 2 * (12 * 32**2 + 9 * 32 + 4 * 32) + 2 * 32
    assert f"x {total:,}" in out
    assert "activations (approximate)" in out
    assert err.endswith("trainer: fsdp, padded rows because gpt2 has no layers at model.layers; engine: transformers\n")
    code, _, err = plan(*words)
    assert (code, err) == (
        2,
        "slimectl: --backend megatron: gpt2 models have no weight mapping. Add --backend fsdp, which trains any causal"
        " model of transformers.\n",
    )
