"""Learning-rate schedules of every stack's launch files, as settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from settings.test_launch_scripts import reading

TRL = "model_name_or_path: m\ndataset_name: d.jsonl\nnum_generations: 8\n"
VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=d.parquet data.train_batch_size=64 trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.actor.optim."
)
ROLL = "pretrain: m\nrollout_batch_size: 8\nactor_train:\n  training_args:\n    "


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "run.sh",
            "python train.py --hf-checkpoint m --lr-decay-style WSD --lr-wsd-decay-iters 20 "
            "--lr-wsd-decay-style minus_sqrt --lr-warmup-fraction 0.1",
            {"decay_style": "WSD", "wsd_decay_iters": 20, "wsd_decay_style": "minus_sqrt", "warmup_fraction": 0.1},
        ),
        (
            "run.sh",
            "python train.py --hf-checkpoint m --lr-decay-style inverse-square-root --lr-warmup-iters 5",
            {"decay_style": "inverse-square-root", "warmup_iters": 5},
        ),
        ("run.yaml", f"{TRL}warmup_ratio: 0.1\n", {"warmup_fraction": 0.1}),
        ("run.yaml", f"{TRL}warmup_steps: 0.05\n", {"warmup_fraction": 0.05, "warmup_iters": 0}),
        ("run.yaml", f"{TRL}warmup_steps: 5\n", {"warmup_fraction": None, "warmup_iters": 5}),
        (
            "run.yaml",
            f"{TRL}lr_scheduler_type: inverse_sqrt\nwarmup_steps: 5\n",
            {"decay_style": "inverse-square-root", "warmup_iters": 5},
        ),
        (
            "run.yaml",
            f"{TRL}lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {{num_decay_steps: 20}}\n",
            {"decay_style": "WSD", "wsd_decay_iters": 20, "wsd_decay_style": "cosine"},
        ),
        (
            "run.yaml",
            f"{TRL}lr_scheduler_type: warmup_stable_decay\n"
            "lr_scheduler_kwargs: {num_decay_steps: 20, decay_type: 1-sqrt}\n",
            {"decay_style": "WSD", "wsd_decay_iters": 20, "wsd_decay_style": "minus_sqrt"},
        ),
        ("run.sh", f"{VERL}lr_warmup_steps_ratio=0.05", {"decay_style": "constant", "warmup_fraction": 0.05}),
        ("run.sh", f"{VERL}lr_warmup_steps_ratio=0", {"warmup_fraction": None}),
        (
            "run.sh",
            f"{VERL}lr_decay_style=WSD actor_rollout_ref.actor.optim.lr_wsd_decay_steps=9",
            {"decay_style": "WSD", "wsd_decay_iters": 9, "wsd_decay_style": "exponential"},
        ),
        ("run.yaml", f"{ROLL}warmup_ratio: 0.1\n", {"warmup_fraction": 0.1}),
        (
            "run.sh",
            "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --actor_learning_rate 1e-6",
            {"warmup_fraction": 0.03, "decay_style": "cosine"},
        ),
    ],
)
def test_a_schedule_is_the_one_of_the_launch_file(file: str, text: str, expected: dict[str, Any], tmp_path: Path):
    train = reading(tmp_path, text, file).conversion.settings.train
    assert {name: getattr(train, f"lr_{name}") for name in expected} == expected


def test_a_schedule_of_trl_that_falls_otherwise_here_is_listed(tmp_path: Path):
    """Without a warm-up transformers has sqrt(10000 / (step + 10000)), Megatron-core sqrt(1 / step)."""
    conversion = reading(tmp_path, f"{TRL}lr_scheduler_type: inverse_sqrt\n", "run.yaml").conversion
    assert conversion.settings.train.lr_decay_style == "constant"
    [omission] = [item for item in conversion.omissions if "inverse_sqrt" in item.flag]
    assert omission.reason.endswith("Set train.lr_decay_style and a warm-up")
