"""`slimectl plan --placement`: who is where, before anything starts, and what could not be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimectl import recipes
from slimectl.cli.app import app

NODE_OF_RANKS = ["cluster.executor=ray", "cluster.actor_num_gpus_per_node=8", "engine.backend=sglang"]


def plan(*settings: str, words: tuple[str, ...] = ()) -> tuple[int, list[str], str]:
    assigned = [word for setting in [*NODE_OF_RANKS, *settings] for word in ("-s", setting)]
    result = CliRunner().invoke(app, ["plan", "--placement", *assigned, *words])
    return result.exit_code, result.stdout.splitlines(), result.stderr


def test_a_line_a_gpu_says_who_is_there():
    code, lines, err = plan("cluster.rollout_num_gpus=8", "cluster.rollout_num_gpus_per_engine=4")
    assert code == 0
    assert len(lines) == 1 + 16
    assert lines[1].split() == ["0", "0", "rank", "0", "-"]
    assert [line.split() for line in lines[12:14]] == [["1", "3", "-", "engine", "0"], ["1", "4", "-", "engine", "1"]]
    assert err == "2 machines of 8 GPUs: 8 ranks and 2 engines of 4 GPUs, on separate GPUs\n"


def test_json_has_places_problems_and_notes():
    code, lines, _ = plan("cluster.colocate=true", "cluster.rollout_num_gpus=8", words=("--json",))
    made = json.loads("\n".join(lines))
    assert (code, made["problems"], made["notes"]) == (0, [], [])
    assert made["places"][7] == {"node": 0, "gpu": 7, "rank": 7, "engine": 7, "share": 0.5}


def test_what_cannot_be_placed_is_shown_and_said_with_the_nearest_sizes():
    code, lines, err = plan("cluster.rollout_num_gpus=9", "cluster.rollout_num_gpus_per_engine=3")
    assert code == 1
    assert len(lines) == 1 + 17
    assert err.splitlines()[0] == (
        "cluster.rollout_num_gpus_per_engine: 3 splits engine 2 over two machines of 8 GPUs. Use 2 or 4, or train on 5"
    )


def test_a_model_that_cannot_be_cut_so_is_said_too():
    settings = ("train.backend=megatron", "model.card=qwen3-8B", "megatron.pipeline_model_parallel_size=8")
    code, _, err = plan(*settings)
    assert code == 1
    assert "megatron.pipeline_model_parallel_size: 8 does not divide 36 layers. Possible: 1, 2, 3, 4" in err


def test_batches_that_leave_ranks_idle_are_a_note():
    code, _, err = plan("run.rollout_batch_size=3", "rollout.n_samples_per_prompt=4")
    assert code == 0
    assert "12 rollouts per step are not a multiple of 8 data-parallel ranks, so some ranks wait. Use 8 or 16." in err


def test_on_a_cpu_ranks_are_processes():
    code, lines, err = plan(words=("--device", "cpu"))
    assert (code, len(lines)) == (0, 1 + 8)
    assert err == "1 machine: 8 ranks, and 1 engine where there is room\n"


@pytest.mark.parametrize(
    ("name", "ranks", "engines"),
    [
        ("qwen3-1.7b-h100", 1, 1),
        ("qwen3-8b-8xh100", 8, 8),
        ("qwen3-8b-8xh100-async", 4, 4),
        ("qwen3-30b-a3b-2x8h100", 16, 4),
    ],
)
def test_the_gpu_recipes_have_their_ranks_and_engines(
    name: str, ranks: int, engines: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = str(Path(recipes.__file__).parent / f"{name}.toml")
    placement = CliRunner().invoke(app, ["plan", "--placement", "-c", file, "--json"])
    places = json.loads(placement.stdout)["places"]
    assert sorted(place["rank"] for place in places if place["rank"] is not None) == list(range(ranks))
    assert {place["engine"] for place in places if place["engine"] is not None} == set(range(engines))
