"""Defaults of slime's arguments and of Megatron's: each is set, is the same here, or is listed by name.

From slime/utils/arguments.py at commit 002fa9d6bac4 and megatron/training/arguments.py of Megatron-LM 0.15.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimectl.migrate.launch_scripts.conversion import canonical
from slimectl.migrate.launch_scripts.reading import read
from slimectl.migrate.launch_scripts.slime import SLIME

TRAIN = (
    "python3 train.py --hf-checkpoint /m --prompt-data /d.jsonl --rollout-batch-size 4 --num-rollout 3 --rm-type math"
)

DEFAULTS: dict[str, Any] = {
    "actor-num-nodes": 1, "actor-num-gpus-per-node": 8, "rollout-num-gpus-per-engine": 1, "num-gpus-per-node": 8,
    "colocate": False, "update-weight-disk-keep-files": False, "update-weight-delta-encoding": "xor",
    "update-weight-delta-checksum": "xxh3-128", "rollout-temperature": 1.0, "rollout-top-p": 1.0, "rollout-top-k": -1,
    "rollout-skip-special-tokens": False, "rollout-shuffle": False, "rollout-seed": 42, "partial-rollout": False,
    "mask-offpolicy-in-partial-rollout": False, "use-fault-tolerance": False, "input-key": "input",
    "metadata-key": "metadata", "tool-key": "tools", "apply-chat-template": False, "n-samples-per-prompt": 1,
    "micro-batch-size": 1, "balance-data": False, "balance-by-flops": False, "use-dynamic-batch-size": False,
    "n-samples-per-eval-prompt": 1, "seed": 1234, "clip-grad": 1.0, "calculate-per-token-loss": False, "lr": 1e-6,
    "num-critic-only-steps": 0, "eps-clip": 0.2, "value-clip": 0.2, "kl-coef": 0.0, "kl-loss-coef": 0.0,
    "use-unbiased-kl": False, "entropy-coef": 0.0, "gamma": 1.0, "lambd": 1.0, "normalize-advantages": False,
    "use-rollout-logprobs": False, "use-tis": False, "tis-clip": 2.0, "tis-clip-low": 0.0, "use-opsm": False,
    "opsm-delta": 1e-4, "use-routing-replay": False, "use-rollout-routing-replay": False,
    "wandb-always-use-train-step": False, "log-multi-turn": False, "log-passrate": False, "log-correct-samples": False,
    "check-weight-update-equal": False, "group-rm": False, "ci-train-rollout-logprob-abs-diff-threshold": 0.1,
    # of Megatron
    "lr-decay-style": "linear", "lr-warmup-iters": 0, "min-lr": 0.0, "weight-decay": 0.01, "adam-beta1": 0.9,
    "adam-beta2": 0.999, "adam-eps": 1e-8, "hidden-dropout": 0.1, "attention-dropout": 0.1,
    "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1, "context-parallel-size": 1,
    "expert-model-parallel-size": 1, "optimizer-cpu-offload": False,
}  # fmt: skip
"""The value that each flag has in slime where it is not given."""
OPPOSITE: dict[str, tuple[str, Any]] = {
    "skip-eval-before-train": ("eval.before_train", True),
    "disable-grpo-std-normalization": ("algorithm.grpo_std_normalization", True),
    "disable-wandb-random-suffix": ("track.random_suffix", True),
    "update-weight-buffer-size": ("sync.update_weight_buffer_size", 512),  # 512 * 1024**2 bytes
    "update-weight-transport": ("sync.transport", "auto"),  # nccl, or CUDA IPC on shared GPUs
    "bf16": ("train.dtype", "bfloat16"),
    "train-backend": ("train.backend", "megatron"),
}
"""Settings whose value is not written as that of the flag."""
ESTIMATORS = ("grpo", "gspo", "cispo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
FSDP = {"lr-decay-style": "constant", "weight-decay": 0.0, "adam-beta2": 0.95, "adam-eps": 1e-8, "lr": 1e-6}
"""From slime/backends/fsdp_utils/arguments.py at commit 0c1e2ca1794f; slime resets lr."""


def converted(tmp_path: Path, flags: str) -> tuple[dict[str, Any], str]:
    """All settings by dotted key, defaults included, and the lines of what is listed."""
    (tmp_path / "run.sh").write_text(f"{TRAIN} {flags}\n")
    conversion = read(tmp_path / "run.sh", environ={}).conversion
    assert conversion.problems == []
    sections = conversion.settings.model_dump(by_alias=True)
    values = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    values |= {f"megatron.args.{key}": value for key, value in sections["megatron"]["args"].items()}
    return values, "\n".join(f"{omission.flag} {omission.reason}" for omission in conversion.omissions)


def differences(values: dict[str, Any], listed: str, defaults: dict[str, Any]) -> list[str]:
    """The flags whose default is neither the value here nor listed; settings that the algorithm lacks aside."""
    result = []
    for flag, default in defaults.items():
        key = SLIME.rows[canonical(flag)].key
        if key in values and values[key] != default and flag not in listed:
            result.append(f"{flag}: {default} there, {key} = {values[key]}")
        if not key and flag not in listed:
            result.append(f"{flag}: {default} there, not listed")
    return result


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_default_of_slime_is_set_or_listed(estimator: str, tmp_path: Path):
    flags = "" if estimator == "grpo" else f"--advantage-estimator {estimator}"
    values, listed = converted(tmp_path, f"{flags} --use-tis --eval-prompt-data aime /aime.jsonl --eval-interval 5")
    assert differences(values, listed, DEFAULTS | {"use-tis": True}) == []
    assert [flag for flag, (key, value) in OPPOSITE.items() if key in values and values[key] != value] == []


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_upper_clip_is_the_lower_one_where_slime_is_given_one(estimator: str, tmp_path: Path):
    values, _ = converted(tmp_path, f"--advantage-estimator {estimator} --eps-clip 3.5e-4")
    assert values["algorithm.eps_clip"] == 3.5e-4
    assert values["algorithm.eps_clip_high"] in (None, 3.5e-4)  # None is eps_clip
    assert (values["algorithm.eps_clip_high"] is None) == (estimator not in ("gspo", "cispo"))


def test_a_divergence_has_the_estimator_of_slime(tmp_path: Path):
    values, listed = converted(tmp_path, "--use-kl-loss --kl-loss-coef 0.01")
    assert values["algorithm.kl_loss_type"] == "k1"
    assert "kl-loss-type" not in listed


def test_the_critic_learns_at_the_rate_of_the_policy(tmp_path: Path):
    assert converted(tmp_path, "--advantage-estimator ppo --lr 2e-6")[0]["algorithm.critic_lr"] == 2e-6


def test_the_fsdp_trainer_of_slime_has_defaults_of_its_own(tmp_path: Path):
    values, listed = converted(tmp_path, "--train-backend fsdp")
    dropout = ("hidden-dropout", "attention-dropout")
    defaults = {flag: value for flag, value in DEFAULTS.items() if flag not in dropout} | FSDP
    assert values["train.backend"] == "fsdp"
    assert differences(values, listed, defaults) == []
    assert "dropout" not in listed


def test_a_response_without_a_limit_is_left_to_the_user(tmp_path: Path):
    (tmp_path / "run.sh").write_text(TRAIN)
    omissions = read(tmp_path / "run.sh", environ={}).conversion.omissions
    (omission,) = [item for item in omissions if item.by_hand]
    assert omission.flag == "--rollout-max-response-len"
    assert omission.reason.endswith("Set rollout.max_response_len by hand")
