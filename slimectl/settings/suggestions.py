"""Suggests the setting that a user means: by names of other programs, by the last part of a key, by similarity."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from slimectl.settings import aliases

OTHER_NAMES = {
    "algorithm.eps_clip": ("cliprange", "clip_range", "clip_ratio", "epsilon", "clip_eps"),
    "algorithm.eps_clip_high": ("epsilon_high", "clip_ratio_high", "clip_high"),
    "algorithm.kl_loss_coef": ("kl_beta", "kl_penalty", "kl_coefficient"),
    "algorithm.name": ("advantage_estimator", "adv_estimator", "loss_type"),
    "eval.interval": ("eval_steps", "test_freq", "eval_every"),
    "model.path": ("model_name_or_path", "model_name", "hf_checkpoint", "pretrain"),
    "rollout.data": ("prompt_data", "dataset", "dataset_name", "train_files", "train_dataset"),
    "rollout.input_key": ("prompt_key", "prompt_column"),
    "rollout.label_key": ("answer_key", "ground_truth_key", "target_key"),
    "rollout.max_prompt_len": ("max_prompt_length",),
    "rollout.max_response_len": (
        "max_new_tokens", "max_tokens", "max_completion_length", "max_response_length", "response_length",
    ),
    "rollout.n_samples_per_prompt": ("num_generations", "group_size", "n", "rollout_n"),
    "run.dir": ("output_dir", "save_dir", "default_local_dir"),
    "run.num_epoch": ("epochs", "num_train_epochs", "total_epochs", "num_epochs"),
    "run.num_rollout": ("max_steps", "total_training_steps", "rounds", "num_rounds", "steps"),
    "run.rollout_batch_size": ("train_batch_size", "prompts_per_step"),
    "run.save_interval": ("save_steps", "save_freq", "save_every"),
    "score.custom_rm_path": ("reward_function", "reward_funcs", "reward_fn", "custom_reward_function"),
    "score.rm_type": ("verifier", "reward", "reward_type"),
    "track.with": ("report_to", "logger", "trackers"),
    "train.clip_grad": ("max_grad_norm", "gradient_clip", "grad_clip", "gradient_clipping"),
    "train.global_batch_size": ("batch_size", "mini_batch_size", "ppo_mini_batch_size", "minibatch_size"),
    "train.lr": ("learning_rate", "learningrate", "actor_learning_rate"),
    "train.lr_decay_style": ("lr_scheduler_type", "lr_scheduler", "scheduler"),
    "train.lr_warmup_iters": ("warmup_steps", "lr_warmup_steps", "num_warmup_steps"),
    "train.micro_batch_size": ("per_device_train_batch_size", "micro_train_batch_size"),
}  # fmt: skip
"""Setting -> its names in other programs (TRL, verl, OpenRLHF, transformers)."""

_BY_OTHER_NAME = {other: key for key, names in OTHER_NAMES.items() for other in names}


def suggestion(name: str, available: Sequence[str], *, elsewhere: Sequence[str] = ()) -> str | None:
    """Return the setting that an unknown name most likely means; None if none is near.

    >>> suggestion("train.learning_rate", ["train.lr", "train.lora_rank"])
    'train.lr'

    It is the one of this name in other programs, else the most similar of the `available` ones, else one whose last
    part is the name's. Those `elsewhere` are not compared by similarity.
    """
    leaf = name.rpartition(".")[2].lower().replace("-", "_")
    other = _BY_OTHER_NAME.get(leaf)
    if other is not None and other in {*available, *elsewhere}:
        return other
    near = difflib.get_close_matches(name, available, n=1, cutoff=0.6)
    return aliases.current_name(near[0]) if near else next(iter(keys_of_leaf(leaf, [*available, *elsewhere])), None)


def keys_of_leaf(leaf: str, available: Sequence[str]) -> list[str]:
    """Return the keys of two parts of which the last is `leaf`; [train] and [run] before others.

    >>> keys_of_leaf("lr", ["sft_warmup.lr", "train.lr", "algorithm.grpo.lr"])
    ['train.lr', 'sft_warmup.lr']
    """
    matches = [key for key in available if key.count(".") == 1 and key.partition(".")[2] == leaf]
    return sorted(matches, key=lambda key: key.partition(".")[0] not in ("train", "run"))
