"""Conflicts between keys of an algorithm: keys that exclude each other, or have no effect without another."""

from __future__ import annotations

from collections.abc import Iterator

from slimectl.redaction import REFERENCES
from slimectl.settings.algorithm import AlgorithmSettings
from slimectl.settings.cluster import SyncSettings
from slimectl.settings.policy_gradient import Opd, PolicyGradient, Ppo, ReinforceFamily
from slimectl.settings.rollout import RolloutSettings
from slimectl.settings.run import RunSettings
from slimectl.settings.score import ScoreSettings
from slimectl.settings.train import TrainSettings

REQUIRES_SWITCH = {
    "use_tis": ("tis_batch_normalize",),
    "use_rs": ("rs_level", "rs_clip", "rs_clip_low"),
    "use_opsm": ("opsm_delta",),
}
"""Keys without effect while their switch is off. TIS bounds are not among them: their would-be effect is reported."""


def algorithm_conflicts(algorithm: PolicyGradient, *, temperature: float) -> Iterator[str]:
    """Conflicts within [algorithm], each as a line that names the keys and the remedy.

    `temperature` is that of the rollout.
    """
    if algorithm.kl_coef and algorithm.kl_loss_coef:
        yield (
            "algorithm.kl_coef and algorithm.kl_loss_coef exclude each other: the divergence goes into the reward or "
            "into the loss; set one to 0"
        )
    if isinstance(algorithm, ReinforceFamily) and not algorithm.normalize_advantages:
        yield f"algorithm.normalize_advantages: algorithm.name {algorithm.name} needs it; drop the key"
    if algorithm.calculate_per_token_loss and algorithm.fixed_length:
        yield "algorithm.calculate_per_token_loss and algorithm.fixed_length are two reductions; give one of them"
    yield from _teacher_contradictions(algorithm, temperature)
    yield from _correction_contradictions(algorithm)
    yield from _ineffective_keys(algorithm)
    if isinstance(algorithm, Ppo):
        yield from _critic_contradictions(algorithm)


def _teacher_contradictions(algorithm: PolicyGradient, temperature: float) -> Iterator[str]:
    urls = algorithm.opd_teacher_url
    if urls and algorithm.opd_teacher_load:
        yield "algorithm.opd_teacher_load and algorithm.opd_teacher_url are two teachers; give one of them"
    if urls and temperature != 1.0:
        yield (
            f"algorithm.opd_teacher_url and rollout.temperature: {temperature:g} exclude each other: servers tell the "
            f"probabilities of temperature 1; set that, or give algorithm.opd_teacher_load"
        )
    for url in urls:
        if not url.startswith(("http://", "https://", *REFERENCES)):
            yield f"algorithm.opd_teacher_url: {url!r} is no address; write http://HOST:PORT"


def _correction_contradictions(algorithm: PolicyGradient) -> Iterator[str]:
    for key in ("use_tis", "use_rs"):
        if algorithm.use_rollout_logprobs and getattr(algorithm, key):
            yield (
                f"algorithm.use_rollout_logprobs and algorithm.{key} exclude each other: with the engine's own "
                f"log-probabilities there is nothing to correct; drop one"
            )
    for kind in ("tis", "rs"):
        low, high = getattr(algorithm, f"{kind}_clip_low"), getattr(algorithm, f"{kind}_clip")
        if low > high:
            yield f"algorithm.{kind}_clip_low: {low:g} is above algorithm.{kind}_clip: {high:g}; swap them"
    if algorithm.tis_mode == "truncate" and algorithm.tis_clip_low:
        yield (
            f"algorithm.tis_clip_low: {algorithm.tis_clip_low:g} has no effect with algorithm.tis_mode = "
            f'"truncate", which holds the upper bound only; set tis_mode = "clip" or drop it'
        )


def _critic_contradictions(algorithm: Ppo) -> Iterator[str]:
    separate_only, shared_only = ("critic_load", "critic_lr", "num_critic_only_steps"), ("value_coef",)
    for key in separate_only if algorithm.critic == "shared" else shared_only:
        if getattr(algorithm, key) != Ppo.model_fields[key].default:
            yield f"algorithm.{key} has no effect with algorithm.critic = {algorithm.critic}; drop one of them"


def _ineffective_keys(algorithm: PolicyGradient) -> Iterator[str]:
    if algorithm.ref_update_interval and not (algorithm.kl_coef or algorithm.kl_loss_coef):
        yield (
            "algorithm.ref_update_interval has no effect without a divergence from the reference; set "
            "algorithm.kl_coef or algorithm.kl_loss_coef, or drop it"
        )
    if isinstance(algorithm, Opd) and algorithm.kl_coef:
        yield (
            "algorithm.kl_coef has no effect with algorithm.name opd, which learns from no reward; use "
            "algorithm.kl_loss_coef"
        )
    for key in ("opd_teacher_load", "opd_teacher_url"):
        if getattr(algorithm, key) and not algorithm.opd_kl_coef:
            yield f"algorithm.{key} has no effect with algorithm.opd_kl_coef = 0; set opd_kl_coef or drop it"
    for switch, keys in REQUIRES_SWITCH.items():
        for key in keys:
            if not getattr(algorithm, switch) and getattr(algorithm, key) != type(algorithm).model_fields[key].default:
                yield f"algorithm.{key} has no effect without algorithm.{switch} = true; set that or drop it"


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
    if not isinstance(algorithm, PolicyGradient):
        sections = {"rollout": rollout, "score": score, "train": train}
        for name in OF_POLICY_GRADIENTS:
            section, _, key = name.partition(".")
            if getattr(sections[section], key):
                yield f"{name} has no effect with algorithm.name {algorithm.name}, whose loss is its own; drop it"
