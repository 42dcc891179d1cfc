"""Every metric that slimectl reports: name, unit, axis, definition. A test fails if a stage emits another name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Metric:
    """One quantity; `{…}` in the name stands for a part that varies."""

    name: str
    unit: str
    axis: str
    definition: str

    def matches(self, name: str) -> bool:
        return re.fullmatch(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(self.name)), name) is not None


def _train() -> list[Metric]:
    facts = {
        "loss": ("", "What is minimised: sum over tokens of weight times loss"),
        "pg_loss": ("", "The clipped surrogate alone"),
        "pg_clipfrac": ("", "Share of tokens whose clipped branch is the larger"),
        "ppo_kl": ("nat", "Mean of old minus present log-probability"),
        "ois": ("", "Mean importance ratio exp(present - old)"),
        "kl_loss": ("nat", "Divergence from the reference, before its coefficient"),
        "entropy_loss": ("nat", "Mean entropy of the policy"),
        "train_rollout_logprob_abs_diff": ("nat", "Mean |trainer - engine| log-probability"),
        "train_rollout_k1": ("nat", "k1 estimate of the divergence of trainer and engine"),
        "train_rollout_k3": ("nat", "k3 estimate of the same"),
        "tis": ("", "Mean truncated importance weight"),
        "tis_clipfrac": ("", "Share of tokens whose importance weight was truncated"),
        "tis_max": ("", "Largest importance weight before truncation"),
        "tis_masked": ("", "Share of tokens that importance sampling or rejection left out"),
        "opd_reverse_kl": ("nat", "Mean log-probability less the teacher's, of sampled tokens"),
        "pair_accuracy": ("", "Share of pairs whose better answer has the larger reward"),
        "reward_margin": ("", "Mean reward of better answers less that of worse ones, by the model that learns"),
        "chosen_reward": ("", "Mean reward of better answers; for dpo the one that policy and reference imply"),
        "rejected_reward": ("", "The same of worse answers"),
        "critic-loss": ("", "What the critic minimises"),
        "critic-value_loss": ("", "Squared error of its values, clipped"),
        "critic-value_clipfrac": ("", "Share of tokens whose value was clipped"),
        "critic-grad_norm": ("", "The critic's gradient norm before clipping"),
        "critic-lr": ("", "The critic's learning rate"),
        "critic-explained_variance": ("", "1 - var(returns - values) / var(returns), with values before the round"),
        "opsm_clipfrac": ("", "Share of tokens in bad sequences that the policy has left, whose loss was zeroed"),
        "grad_norm": ("", "Global gradient norm before clipping"),
        "lr": ("", "Learning rate of the step"),
        "global_batch_size": ("rollouts", "Rollouts that made the step"),
        "rollouts_left_over": ("rollouts", "Rollouts kept for the next step"),
        "step": ("steps", "The axis of train metrics"),
    }
    return [Metric(f"train/{name}", unit, "train/step", text) for name, (unit, text) in facts.items()]


def _rollout() -> list[Metric]:
    facts = {
        "raw_reward": ("", "Mean reward of the round, before any normalisation"),
        "max_reward": ("", "Largest reward"),
        "min_reward": ("", "Smallest reward"),
        "response_len/{mean,median,max,min}": ("tokens", "Length of answers"),
        "truncation_rate": ("", "Share of answers cut at max_response_len"),
        "rollout_log_probs": ("nat", "Mean log-probability of sampled tokens, by the engine"),
        "prefix_cache_hit_rate": ("", "Share of prompt tokens whose computation was shared"),
        "zero_std/count_{reward}": ("groups", "Groups whose answers all got this reward"),
        "dynamic_filter/drop_{reason}": ("groups or samples", "Left out of training, by reason"),
        "error/{category}": ("samples", "Failed attempts, by exception"),
        "staleness/{mean,max}": ("versions", "Weight versions between sampling and training"),
        "values": ("", "Mean value that the critic gave to sampled tokens"),
        "returns": ("", "Mean return of sampled tokens, which the critic learns"),
        "samples_per_second": ("1/s", "Samples a second of generation and grading"),
        "step": ("rounds", "The axis of rollout metrics"),
    }
    return [Metric(f"rollout/{name}", unit, "rollout/step", text) for name, (unit, text) in facts.items()]


def _eval() -> list[Metric]:
    facts = {
        "{name}": ("", "Mean reward on the dataset"),
        "{name}_accuracy": ("", "Share of answers with reward of at least eval.success_threshold"),
        "{name}-truncated_ratio": ("", "Share of answers cut"),
        "{name}-pass@{k}": ("", "Unbiased estimate that one of k answers is right (arXiv:2107.03374)"),
        "{name}-avg@{n}": ("", "Mean over prompts of the share of right answers"),
        "{name}/response_len/{mean,median,max,min}": ("tokens", "Length of answers"),
        "step": ("rounds", "The axis of eval metrics"),
    }
    return [Metric(f"eval/{name}", unit, "eval/step", text) for name, (unit, text) in facts.items()]


def _perf() -> list[Metric]:
    facts = {
        "perf/train_time": ("s", "Forward, backward and optimizer of one step"),
        "perf/rollout_time": ("s", "Generation and grading of one round"),
        "perf/update_weights_time": ("s", "Carrying new weights to the engines"),
        "perf/update_weights_bytes": ("bytes", "What was carried"),
        "perf/update_weights_pause_time": ("s", "For how long of it the engines sampled nothing"),
        "perf/wait_time": ("s", "What training waited for a round"),
        "perf/wait_time_ratio": ("", "Share of a round's time that training waited"),
        "perf/total_time": ("s", "A whole round: waiting, training, carrying weights"),
        "perf/data_preprocess_time": ("s", "Advantages, filters and recomputed log-probabilities of a round"),
        "perf/eval_time": ("s", "One evaluation of all datasets"),
        "perf/actor_train_tok_per_s": ("tokens/s", "Tokens trained on a second, prompts included"),
    }
    return [Metric(name, unit, "rollout/step", text) for name, (unit, text) in facts.items()]


def _warmup() -> list[Metric]:
    same = [Metric(metric.name.replace("train/", "warmup/"), metric.unit, "warmup/step", metric.definition)
            for metric in _train()]  # fmt: skip
    return [Metric("warmup/accuracy", "", "warmup/step", "Share of right answers when the warm-up looked"), *same]


CATALOGUE: tuple[Metric, ...] = (*_train(), *_rollout(), *_eval(), *_perf(), *_warmup())


AXES = {"rollout": "rollout/step", "perf": "rollout/step", "eval": "eval/step", "warmup": "warmup/step"}
"""The axes of names that the catalogue has not, by their first part; all others stand on train/step."""


def known(name: str) -> bool:
    return any(metric.matches(name) for metric in CATALOGUE)


@cache
def axis_of(name: str) -> str:
    """The metric along which `name` is drawn."""
    listed = next((metric.axis for metric in CATALOGUE if metric.matches(name)), None)
    return listed or AXES.get(name.partition("/")[0], "train/step")
