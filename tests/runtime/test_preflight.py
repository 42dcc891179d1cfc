"""--dry-run finds what a run would refuse before its first round, in the same words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimectl.errors import SlimectlError
from slimectl.plugins.registry import VERIFIERS
from slimectl.rewards import Grade
from slimectl.rewards.text import Contains
from slimectl.runtime.preflight import OF_RUN, preflight
from slimectl.runtime.run import TrainingRun
from slimectl.runtime.stage_functions import load_settings
from slimectl.types import Sample

MEGATRON = {"train.backend": "megatron"}
LORA = {"train.lora_rank": 2}


def args(**arguments: Any) -> dict[str, Any]:
    return MEGATRON | {"megatron.args": arguments}


REFUSED: dict[str, dict[str, Any]] = {
    "fp8": args(fp8="hybrid"),
    "attention_dropout": args(attention_dropout=0.1),
    "transformer_impl": args(transformer_impl="transformer_engine"),
    "unknown argument": args(bogus=1),
    "argument of gradients": args(overlap_grad_reduce=True),
    "argument of the optimizer": args(optimizer="sgd"),
    "values of the optimizer": args(exp_avg_dtype="x"),
    "argument of the model": args(hidden_size=99),
    "argument of latent attention": args(q_lora_rank=3),
    "argument that LoRA does not allow": args(moe_shared_expert_overlap=True) | LORA,
    "shared beginnings": args(hidden_dropout=0.1) | {"train.share_prompt_prefix": True},
    "nothing frozen on Megatron": MEGATRON | {"train.freeze_params_name_list": ["nothing"]},
    "half of a matrix frozen": MEGATRON | {"train.freeze_params_name_list": ["q_proj"]},
    "experts recomputed on Megatron": MEGATRON
    | {"train.recompute_granularity": "selective", "train.recompute_modules": ["moe"]},
    "routing replay on Megatron": MEGATRON | {"megatron.use_routing_replay": True},
    "rollout routing replay on Megatron": MEGATRON | {"train.use_rollout_routing_replay": True},
    "nothing frozen": {"train.freeze_params_name_list": ["nothing"]},
    "all frozen": {"train.freeze_params_name_list": ["."]},
    "no regular expression": {"train.freeze_params_name_list": ["("]},
    "target of LoRA": LORA | {"train.lora_targets": ["nope"]},
    "adapter to start from": LORA | {"train.lora_load": "{folder}"},
    "experts recomputed": {"train.recompute_granularity": "selective", "train.recompute_modules": ["moe"]},
    "rollout routing replay": {"train.use_rollout_routing_replay": True},
    "warm-up beyond the end": {"train.lr_decay_style": "linear", "train.lr_warmup_iters": 5},
    "no step of the policy": {
        "algorithm.name": "ppo",
        "algorithm.num_critic_only_steps": 1,
        "train.lr_decay_style": "linear",
    },
    "engine without a GPU": {"engine.device": "cuda"},
    "argument of the template": {
        "rollout.data": ["{folder}/chats.jsonl"],
        "rollout.apply_chat_template_kwargs": {"loudly": 1},
    },
    "prompts without labels": {"rollout.data": ["{folder}/unlabelled.jsonl"]},
    "warm-up without labels": {"sft_warmup.data": "{folder}/unlabelled.jsonl"},
    "prompts that are too long": {"rollout.max_prompt_len": 1},
    "port of another machine": {"track.prometheus_port": 9, "track.prometheus_host": "192.0.2.1"},
    "key of a tracker": {"track.with": ["wandb"], "track.mode": "online", "track.api_key": "env:NO_SUCH_KEY"},
    "key of servers": {"engine.num_engines": 2, "engine.api_key": "env:NO_SUCH_KEY"},
    "argument of a tracker": {"track.with": ["swanlab"], "track.kwargs": {"swanlab": {"bogus": 1}}},
    "address of a Ray cluster": {"cluster.executor": "ray", "cluster.ray_address": "nowhere"},
}
"""Settings that a run refuses, beside those of a run that is right."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preflight")
    words = ("one", "two", "three")
    chats = [{"prompt": [{"role": "user", "content": word}], "label": word} for word in words]
    files = {
        "prompts": [{"prompt": f"say {word}", "label": word} for word in words],
        "unlabelled": [{"prompt": f"say {word}"} for word in words],
        "chats": chats,
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "file").touch()
    return folder


def settings_of(folder: Path, model: Path, **extra: Any) -> Any:
    plain = {
        "model.path": str(model), "rollout.data": ["{folder}/prompts.jsonl"], "score.rm_type": "contains",
        "run.dir": "{folder}/runs", "run.num_rollout": 1, "run.rollout_batch_size": 2,
        "rollout.n_samples_per_prompt": 2, "rollout.max_response_len": 4, "rollout.apply_chat_template": False,
    }  # fmt: skip
    return load_settings(None, json.loads(json.dumps(plain | extra).replace("{folder}", str(folder))))


def without_counts(line: str) -> str:
    """A dry run reads fewer prompts than a run that draws them again and again."""
    return re.sub(r"\b\d+ (prompts|tokens)", r"N \1", line)


@pytest.mark.parametrize("name", REFUSED)
def test_a_dry_run_finds_what_the_run_refuses(folder: Path, model_dir: Callable[[str], Path], name: str):
    settings = settings_of(folder, model_dir("llama"), **REFUSED[name])
    failures = [result.detail for result in preflight(settings, OF_RUN) if result.fine is False]
    with pytest.raises(SlimectlError) as refusal:
        TrainingRun(settings).execute()
    assert without_counts(str(refusal.value)) in map(without_counts, failures)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"run.dir": "{folder}/file/runs"}, "run.dir: {folder}/file is not a folder. Use another."),
        (
            {"track.with": ["tensorboard"], "track.kwargs": {"tensorboard": {"log_dir": "{folder}/file"}}},
            "track.kwargs.tensorboard.log_dir: {folder}/file is not a folder. Use another.",
        ),
        (
            {"track.with": ["jsonl"], "track.kwargs": {"jsonl": {"path": "{folder}/file/lines"}}},
            "track.kwargs.jsonl.path: {folder}/file is not a folder. Use another.",
        ),
    ],
)
def test_a_dry_run_finds_folders_that_cannot_be_made(
    folder: Path, model_dir: Callable[[str], Path], extra: dict[str, Any], words: str
):
    settings = settings_of(folder, model_dir("llama"), **extra)
    failures = [result.detail for result in preflight(settings, OF_RUN) if result.fine is False]
    assert failures == [words.replace("{folder}", str(folder))]
    with pytest.raises(SlimectlError):
        TrainingRun(settings).execute()


def test_a_dry_run_finds_a_folder_that_holds_a_run(model_dir: Callable[[str], Path], folder: Path, tmp_path: Path):
    settings = settings_of(folder, model_dir("llama"), **{"run.dir": str(tmp_path)})
    assert [result.fine for result in preflight(settings, [], new_run=True)] == [True]
    TrainingRun(settings).execute()
    [result] = preflight(settings, [], new_run=True)
    with pytest.raises(SlimectlError) as refusal:
        TrainingRun(settings).execute()
    assert (result.fine, result.detail) == (False, str(refusal.value))


def test_a_dry_run_finds_a_verifier_that_raises(
    folder: Path, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    class Faulty(Contains):
        def explain(self, sample: Sample) -> Grade:
            return Grade(1 / len(sample.response), "whole response", "short")

    monkeypatch.setitem(VERIFIERS.parts, "contains", SimpleNamespace(load=lambda: Faulty))
    settings = settings_of(folder, model_dir("llama"))
    [failure] = [result.detail for result in preflight(settings, OF_RUN) if result.fine is False]
    assert re.fullmatch(
        r"score.rm_type: contains: reward of sample 0: ZeroDivisionError: division by zero \(test_preflight.py:\d+\)",
        failure,
    )


@pytest.mark.parametrize(
    "extra",
    [
        {},
        MEGATRON | LORA,
        args(softmax_scale=0.5, hidden_dropout=0.1),
        LORA | {"train.lora_targets": ["q_proj"]},
        {"train.lr_decay_style": "cosine", "run.num_rollout": 4},
        {"model.path": None, "model.card": "tiny"},
        {"rollout.data": ["{folder}/chats.jsonl"], "rollout.apply_chat_template": True},
    ],
    ids=str,
)
def test_a_dry_run_passes_what_a_run_does(folder: Path, model_dir: Callable[[str], Path], extra: dict[str, Any]):
    settings = settings_of(folder, model_dir("llama"), **extra)
    assert [result for result in preflight(settings, OF_RUN) if result.fine is False] == []


def test_a_dry_run_says_that_the_prompts_name_another_verifier(folder: Path, model_dir: Callable[[str], Path]):
    rows = [{"prompt": "a", "label": "b", "metadata": {"rm_type": name}} for name in ("regex", "exact")]
    (folder / "named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = settings_of(folder, model_dir("llama"), **{"rollout.data": ["{folder}/named.jsonl"]})
    [result] = preflight(settings, ["reward"])
    assert result.detail == "contains, but metadata.rm_type of the prompts overrides it: exact, regex"


def test_a_dry_run_takes_a_checkpoint_of_a_run_for_a_model(
    folder: Path, model_dir: Callable[[str], Path], tmp_path: Path
):
    (tmp_path / "step_000001").mkdir()
    (tmp_path / "step_000001" / "policy").symlink_to(model_dir("llama"))
    (tmp_path / "latest").symlink_to("step_000001")
    settings = settings_of(folder, tmp_path / "latest")
    assert [result for result in preflight(settings, OF_RUN) if result.fine is False] == []
