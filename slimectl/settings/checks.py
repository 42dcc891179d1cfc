"""Conflicts of hooks with other settings."""

from __future__ import annotations

from collections.abc import Iterator

from slimectl.settings.algorithm import AlgorithmSettings
from slimectl.settings.cluster import SyncSettings
from slimectl.settings.rollout import RolloutSettings
from slimectl.settings.run import RunSettings
from slimectl.settings.score import ScoreSettings
from slimectl.settings.train import TrainSettings

OF_ROUNDS = ("dynamic_sampling_filter_path", "buffer_filter_path", "over_sampling_batch_size", "partial_rollout")
"""Keys of [rollout] that control how a round is filled, which rollout.function_path replaces."""

OF_POLICY_GRADIENTS = (
    "train.custom_advantage_function_path",
    "train.custom_loss_function_path",
    "train.custom_tis_function_path",
    "train.custom_pg_loss_reducer_function_path",
    "train.custom_convert_samples_to_train_data_path",
    "score.custom_reward_post_process_path",
    "rollout.data_postprocess_path",
)
"""Hooks that supervised and pairwise losses never call."""


def hook_conflicts(
    *,
    algorithm: AlgorithmSettings,
    rollout: RolloutSettings,
    score: ScoreSettings,
    train: TrainSettings,
    sync: SyncSettings,
    run: RunSettings,
) -> Iterator[str]:
    """Conflicts of a hook with another setting, each as a line that names both keys and the remedy."""
    for key in OF_ROUNDS:
        if rollout.function_path and getattr(rollout, key):
            yield f"rollout.function_path and rollout.{key} exclude each other: the function fills rounds; drop one"
    for key in ("function_path", "data_source_path"):
        if getattr(rollout, key) and run.async_level > 1:
            yield (
                f"rollout.{key} and run.async_level: {run.async_level} exclude each other: no group of a "
                f"further round can be under way; set run.async_level to 0 or 1"
            )
    if train.custom_loss_function_path:
        for key in ("custom_tis_function_path", "custom_pg_loss_reducer_function_path"):
            if getattr(train, key):
                yield f"train.custom_loss_function_path and train.{key} exclude each other: the loss is yours; drop one"
    if sync.custom_post_write_path and sync.transport not in ("disk", "delta"):
        yield (
            f'sync.custom_post_write_path has no effect with sync.transport = "{sync.transport}", which '
            f"writes no files; set disk or delta, or drop it"
        )
    if algorithm.trains_on != "rollouts":
        sections = {"rollout": rollout, "score": score, "train": train}
        for name in OF_POLICY_GRADIENTS:
            section, _, key = name.partition(".")
            if getattr(sections[section], key):
                yield f"{name} has no effect with algorithm.name {algorithm.name}, whose loss is its own; drop it"
