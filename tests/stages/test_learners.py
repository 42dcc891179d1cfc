"""Whole commands with a critic, a teacher and preferences: learnt, saved, resumed, refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from workshop import Workshop, set_up

pytestmark = pytest.mark.slow

ModelDir = Callable[..., Path]
FILE = ["-c", "slimectl.toml"]
STEADY = ["-s", "train.lr_decay_style=constant", "-s", "eval.interval=none", "-s", "eval.before_train=false"]
PREFERENCES = [
    {"prompt": f"say {word}", "chosen": "a" * (i + 1), "rejected": "b" * (4 - i)}
    for i, word in enumerate(("one", "two", "three", "four"))
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, model_dir: ModelDir) -> Workshop:
    made = set_up(tmp_path_factory.mktemp("learners"), model_dir("llama"))
    lines = "".join(json.dumps(record) + "\n" for record in PREFERENCES)
    (made.folder / "preferences.jsonl").write_text(lines)
    return made


def steps(workshop: Workshop, run: str) -> list[dict]:
    return [line for line in workshop.metrics(run) if "train/step" in line["metrics"]]


def test_a_run_of_ppo_goes_on_with_its_critic_as_if_it_had_not_stopped(workshop: Workshop):
    ppo = [*STEADY, "-s", "algorithm.name=ppo", "-s", "algorithm.critic_lr=1e-3", "-s", "run.num_rollout=4"]
    workshop.slimectl("run", *ppo, "-s", "algorithm.num_critic_only_steps=1", "--name", "whole")
    workshop.slimectl("run", *ppo, "-s", "algorithm.num_critic_only_steps=1", "--name", "parts")
    folder = workshop.folder / "runs" / "parts"
    for number in (3, 4):
        shutil.rmtree(folder / f"step_{number:06d}")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("step_000002")
    workshop.slimectl("run", "--resume", str(folder))
    whole, parts = steps(workshop, "whole"), steps(workshop, "parts")
    assert parts == whole
    assert "train/pg_loss" not in whole[0]["metrics"]
    assert whole[1]["metrics"]["train/critic-loss"] > 0
    assert "score.weight" in load_file(folder / "step_000004" / "critic" / "model.safetensors")


def test_a_shared_critic_is_kept_with_its_policy(workshop: Workshop):
    ppo = [*STEADY, "-s", "algorithm.name=ppo", "-s", "algorithm.critic=shared", "-s", "run.num_rollout=2"]
    workshop.slimectl("run", *ppo, "--name", "shared")
    whole, folder = steps(workshop, "shared"), workshop.folder / "runs" / "shared"
    assert whole[1]["metrics"]["train/critic-loss"] > 0
    assert not (folder / "step_000001" / "critic").exists()
    shutil.rmtree(folder / "step_000002")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("step_000001")
    workshop.slimectl("run", "--resume", str(folder))
    assert steps(workshop, "shared") == whole


def test_a_reference_follows_the_policy_and_is_found_again(workshop: Workshop):
    following = [*STEADY, "-s", "algorithm.kl_loss_coef=0.1", "-s", "algorithm.ref_update_interval=2"]
    following += ["-s", "run.num_rollout=4", "-s", "train.lr=1e-2"]
    workshop.slimectl("run", *following, "--name", "following")
    whole = steps(workshop, "following")
    kl = [line["metrics"]["train/kl_loss"] for line in whole]
    # The policy is its reference in round 1, and again in round 3, after two steps away from it.
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 1e-4
    assert kl[2] == pytest.approx(0.0, abs=1e-6)
    folder = workshop.folder / "runs" / "following"
    shutil.rmtree(folder / "step_000004")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("step_000003")
    workshop.slimectl("run", "--resume", str(folder))
    assert steps(workshop, "following") == whole


def test_a_run_of_distillation_needs_a_teacher_of_its_vocabulary(workshop: Workshop, model_dir: ModelDir):
    opd = [*STEADY, "-s", "algorithm.name=opd", "-s", "run.num_rollout=1", "--name", "opd"]
    workshop.slimectl("run", *opd, code=2)
    assert "algorithm.opd_teacher_load: no model is given. Set the teacher's directory, or" in workshop.stderr
    workshop.slimectl("run", *opd, "--force", "-s", f"algorithm.opd_teacher_load={model_dir('llama_untied')}")
    (report,) = steps(workshop, "opd")
    assert report["metrics"]["train/opd_reverse_kl"] != 0


def test_preferences_are_learnt_from_a_plain_file(workshop: Workshop):
    dpo = ["train", "preferences.jsonl", "--algorithm", "dpo", *FILE, "-s", "train.global_batch_size=2"]
    reports = workshop.slimectl(*dpo, "--save", "preferring").decode().splitlines()
    first, second = (json.loads(line)["metrics"] for line in reports)
    assert first["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert (first["train/global_batch_size"], second["train/reward_margin"] != 0) == (2, True)
    assert (workshop.folder / "preferring" / "model.safetensors").exists()


def test_a_reward_model_is_saved_with_its_head_and_begins_from_there(workshop: Workshop):
    learn = ["train", "preferences.jsonl", "--algorithm", "reward_model", *FILE, "-s", "train.lr=1e-2"]
    (line,) = workshop.slimectl(*learn, "--save", "judge").decode().splitlines()
    assert json.loads(line)["metrics"]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    (again,) = workshop.slimectl(*learn, "--model", "judge").decode().splitlines()
    assert json.loads(again)["metrics"]["train/loss"] < 0.69
    grading = ["-s", "score.rm_type=reward_model", "-s", 'score.rm_options={path = "judge"}']
    short = ["-s", "run.num_rollout=1", "-s", "score.custom_rm_path=none", "--name", "judged"]
    workshop.slimectl("run", *STEADY, *grading, *short)
    (step,) = steps(workshop, "judged")
    assert step["metrics"]["rollout/raw_reward"] != 0
    assert step["metrics"]["train/grad_norm"] > 0


def test_a_preference_without_an_answer_is_refused_by_its_line(workshop: Workshop):
    (workshop.folder / "half.jsonl").write_text('{"prompt": "say", "chosen": "a"}\n')
    workshop.slimectl("train", "half.jsonl", "--algorithm", "dpo", *FILE, code=3)
    assert "half.jsonl:1: no key 'rejected'" in workshop.stderr


@pytest.mark.parametrize("name", ["dpo", "reward_model", "sft"])
def test_what_needs_no_rollouts_is_no_run(workshop: Workshop, name: str):
    workshop.slimectl("run", "-s", f"algorithm.name={name}", "--name", name, code=2)
    assert f"algorithm.name: {name} needs no rollouts. Use `slimectl train`" in workshop.stderr


def test_a_run_with_adapters_pushes_merged_weights_and_goes_on_with_either_trainer(workshop: Workshop):
    lora = [*STEADY, "-s", "train.lora_rank=4", "-s", "train.lr=1e-2", "-s", "run.num_rollout=3"]
    workshop.slimectl("run", *lora, "-s", "train.backend=megatron", "--name", "adapted")
    whole = steps(workshop, "adapted")
    # The engine samples with what the trainer computes: adapters are in what was pushed.
    assert all(line["metrics"]["train/train_rollout_logprob_abs_diff"] < 1e-4 for line in whole[1:])
    assert sum(line["metrics"]["train/grad_norm"] for line in whole) > 0
    checkpoint = workshop.folder / "runs" / "adapted" / "step_000003" / "policy"
    assert (checkpoint / "adapter" / "adapter_config.json").exists()
    (workshop.folder / "demonstrations.jsonl").write_text('{"prompt": "say", "label": "a"}\n' * 4)
    sft = ["train", "demonstrations.jsonl", "--algorithm", "sft", *FILE, "-s", "train.lora_rank=4"]
    (line,) = workshop.slimectl(*sft, "--load", "runs/adapted/step_000003").decode().splitlines()
    assert json.loads(line)["weight_version"] == "4"
