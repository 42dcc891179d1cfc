"""Catalogue of every metric that slimectl reports: name, unit, axis, definition, naming.

A test fails if a stage emits another name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache


@dataclass(frozen=True)
class Metric:
    """One metric. `{…}` in the name is a variable part."""

    name: str
    unit: str
    axis: str
    definition: str
    naming: str = "slime"
    """Value of track.naming under which it is reported: slime or roll."""

    def matches(self, name: str) -> bool:
        if "{" not in self.name:
            return self.name == name
        return re.fullmatch(re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(self.name)), name) is not None


def _train() -> list[Metric]:
    definitions = {
        "loss": ("", "Training loss: sum over tokens of weight times loss"),
        "pg_loss": ("", "The clipped surrogate only"),
        "pg_clipfrac": ("", "Share of tokens whose clipped branch is the larger"),
        "clipfrac": ("", "The same"),
        "ppo_kl": ("nat", "Mean of old - current log-probability"),
        "approxkl": ("nat²", "Mean of (current - old log-probability)² / 2, the k2 estimate of the same divergence"),
        "ois": ("", "Mean importance ratio exp(current - old), per sequence for gspo"),
        "ratio_max": ("", "Largest ratio of a trained token"),
        "ratio_min": ("", "Smallest ratio of a trained token"),
        "ratio_high_clipfrac": ("", "Share of tokens whose ratio is above its bound, whatever their advantage"),
        "ratio_low_clipfrac": ("", "Share of tokens whose ratio is below its bound, whatever their advantage"),
        "kl_loss": ("nat", "KL divergence from the reference, before its coefficient, reduced like the loss"),
        "kl": ("nat", "The same"),
        "entropy_loss": ("nat", "Entropy of the policy, before its coefficient, reduced like the loss"),
        "value_loss": ("", "Clipped squared error of the critic's values, as train/critic-value_loss"),
        "value_clipfrac": ("", "Share of tokens whose value was clipped, as train/critic-value_clipfrac"),
        "sft_loss": ("nat", "Negative log-probability of the responses, reduced like the loss (the loss of sft)"),
        "positive_sft_loss": ("nat", "Part of train/sft_loss for responses with a reward above 0"),
        "negative_sft_loss": ("nat", "Part of train/sft_loss for the other responses"),
        "train_rollout_logprob_abs_diff": ("nat", "Mean |trainer - engine| log-probability"),
        "train_rollout_k1": ("nat", "k1 estimate of the KL divergence between trainer and engine"),
        "train_rollout_k3": ("nat", "k3 estimate of the same"),
        "tis": ("", "Mean truncated importance weight"),
        "tis_clipfrac": ("", "Share of tokens whose importance weight was truncated"),
        "tis_max": ("", "Largest importance weight before truncation"),
        "tis_masked": ("", "Share of tokens that importance sampling or rejection masked"),
        "opd_kl": (
            "nat",
            "Mean divergence of the policy's distributions from the teacher's (algorithm.opd_divergence)",
        ),
        "opd_reverse_kl": ("nat", "Mean of log-probability - teacher's log-probability of sampled tokens"),
        "pair_accuracy": ("", "Share of pairs whose chosen response has the larger reward"),
        "reward_margin": ("", "Mean reward of chosen - rejected responses, by the model in training"),
        "chosen_reward": ("", "Mean reward of chosen responses (for dpo the implicit reward)"),
        "rejected_reward": ("", "Mean reward of rejected responses"),
        "critic-loss": ("", "Loss of the critic"),
        "critic-value_loss": ("", "Clipped squared error of its values"),
        "critic-value_clipfrac": ("", "Share of tokens whose value was clipped"),
        "critic-value": ("", "Mean value of tokens at the start of the round"),
        "critic-vpred": ("", "Mean current value of tokens"),
        "critic-error": ("", "Mean squared error of the current values, without clipping"),
        "critic-grad_norm": ("", "The critic's gradient norm before clipping"),
        "critic-lr": ("", "The critic's learning rate"),
        "critic-explained_variance": ("", "1 - var(returns - values) / var(returns), with values before the round"),
        "opsm_clipfrac": ("", "Share of tokens that off-policy sequence masking (algorithm.use_opsm) masked"),
        "grad_norm": ("", "Global gradient norm before clipping"),
        "lr": ("", "Learning rate of the step"),
        "global_batch_size": ("rollouts", "Rollouts in the step"),
        "valid_samples": ("samples", "Samples of the step with at least one trained token"),
        "valid_sample_ratio": ("", "Share of the step's non-empty samples that have a trained token"),
        "samples_left_out": ("samples", "Samples that did not fit into memory alone. Absent if all did"),
        "critic-samples_left_out": ("samples", "The same in training the critic"),
        "rollouts_left_over": ("rollouts", "Rollouts kept for the next step"),
        "ppo_epoch": ("", "Pass over the round's samples to which the step belongs (train.ppo_epochs above 1)"),
        "step": ("steps", "The axis of train metrics"),
    }
    return [Metric(f"train/{name}", unit, "train/step", text) for name, (unit, text) in definitions.items()]


Definitions = dict[str, tuple[str, str]]
"""Unit and definition of metrics by name."""


def _rollout() -> list[Metric]:
    definitions: Definitions = {
        **{f"rollout/{name}": definition for name, definition in (_rewards() | _answers() | _rounds()).items()},
        "passrate/pass@{k}": ("", "Estimated probability that one of k responses is correct (track.log_passrate)"),
        "multi_turn/raw_response_length/{mean,max,min}": ("tokens", "Tokens after the prompt (track.log_multi_turn)"),
        "multi_turn/wo_obs_response_length/{mean,max,min}": ("tokens", "Tokens that the policy wrote"),
        "multi_turn/round_number/{mean,max,min}": ("turns", "Turns of the policy"),
    }
    return [Metric(name, unit, "rollout/step", text) for name, (unit, text) in definitions.items()]


def _rewards() -> Definitions:
    """Define the metrics of a round's rewards, advantages, returns and log-probabilities."""
    return {
        "raw_reward": ("", "Mean reward of the round, before any normalisation"),
        "avg_reward": ("", "The same"),
        "max_reward": ("", "Largest reward"),
        "min_reward": ("", "Smallest reward"),
        "std_reward": ("", "Standard deviation of the rewards, divided by their number"),
        "reward/{component}": ("", "Mean of a named component of the rewards, for rewards that are objects"),
        "reward/{component}/std": ("", "Its standard deviation, divided by the number of samples"),
        "reward_quantiles/{p10,p25,p50,p75,p90}": ("", "Percentiles of the rewards"),
        "reward_histogram": ("", "Histogram of the rewards, for trackers that draw one. Not in metrics.jsonl"),
        "rewards": ("", "Mean reward after comparison within groups, or the raw one without comparison"),
        "rewards/{std,max,min}": ("", "Standard deviation, largest and smallest of these"),
        "penalized_rewards": ("", "The same minus algorithm.kl_coef times the response's KL divergence, if it is set"),
        "penalized_rewards/{std,max,min}": ("", "Standard deviation, largest and smallest of these"),
        "reward_clip_frac": ("", "Share of compared rewards beyond algorithm.reward_clip"),
        "advantage_clip_frac": ("", "Share of trained tokens whose advantage is beyond algorithm.advantage_clip"),
        "advantages": ("", "Mean advantage of trained tokens"),
        "advantages/{std,max,min}": ("", "Standard deviation, largest and smallest of these"),
        "returns/{std,max,min}": ("", "Standard deviation, largest and smallest of the returns"),
        "values/{std,max,min}": ("", "Standard deviation, largest and smallest of the values"),
        "log_probs": ("nat", "Mean log-probability of trained tokens, by the policy before the round"),
        "ref_log_probs": ("nat", "The same, by the reference"),
        "kl": ("nat", "log_probs - ref_log_probs, the k1 estimate of the KL divergence from the reference"),
        "entropy": ("nat", "Mean entropy of the tokens of the round's first step, by the policy before the round"),
    }


def _answers() -> Definitions:
    """Define the metrics of a round's responses, and of the agents, environments and engines that produced them."""
    return {
        "response_len/{mean,median,max,min}": ("tokens", "Length of responses"),
        "avg_response_length": ("tokens", "Mean length of responses"),
        "prompt_len/{mean,max,min}": ("tokens", "Length of prompts"),
        "repetition_frac": ("", "Share of long responses whose end repeats itself"),
        "ngram_repetition": (
            "",
            "Share of the 4-grams of tokens in the last 256 tokens of responses that occurred before there",
        ),
        "duplicate_ratio": ("", "Share of responses that equal another response to the same prompt"),
        "length_reward_correlation": ("", "Correlation of length and reward of responses within groups"),
        "reward_timeouts": ("", "Share of samples whose grading timed out. They have reward 0"),
        "no_reward": ("", "Share of samples without a reward (score.none_reward = skip)"),
        "truncated_ratio": ("", "Share of responses truncated at max_response_len"),
        "category/{category}/share": ("", "Share of responses in this category (track.log_reward_category)"),
        "category/{category}/reward": ("", "Mean reward of responses in this category"),
        "correct_samples/count": ("samples", "Correct responses (track.log_correct_samples)"),
        "correct_samples/response_len/{mean,max,min}": ("tokens", "Length of correct responses"),
        "truncation_rate": ("", "Share of responses truncated at max_response_len"),
        "rollout_log_probs": ("nat", "Mean log-probability of sampled tokens, by the engine"),
        "prefix_cache_hit_rate": ("", "Share of prompt tokens served from the prefix cache"),
        "agent/turns": ("turns", "Mean responses of the policy per attempt of a program (rollout.agent)"),
        "agent/tool_calls": ("calls", "Mean tool calls in its responses"),
        "agent/refused_requests": ("requests", "Mean requests of the program that got an error"),
        "agent/timed_out": ("", "Share of attempts that were ended at rollout.agent_timeout_s"),
        "agent/failed": (
            "",
            "Share of attempts whose program ended with a nonzero status, or without a response of the policy",
        ),
        "env/turns": ("turns", "Mean responses of the policy per episode (rollout.env)"),
        "env/tool_calls": ("calls", "Mean tool calls in its responses"),
        "env/errors": ("turns", "Mean responses that the environment rejected as invalid"),
        "env/failures": ("episodes", "Mean episodes per sample that the environment aborted"),
        "env/timeouts": ("episodes", "Mean episodes per sample that exceeded rollout.env_timeout_s"),
        "env/turn_reward": ("", "Mean reward of a turn"),
        "turn_reward/{turn}": ("", "Mean reward of the turns with this number, from 0 (the first 16)"),
        "state_groups": ("states", "Different states in which turns of one prompt's attempts were taken"),
        "state_group_size/{mean,max,min}": ("turns", "Turns that were taken in the same state"),
        "spec_accept_length": ("tokens", "Tokens per pass of the model, with speculative decoding"),
        "spec_accept_rate": ("", "Share of drafted tokens that were accepted, with speculative decoding"),
    }


def _rounds() -> Definitions:
    """Define the metrics of a whole round: its groups, dropped and kept samples, staleness and time."""
    return {
        "zero_std/count_{reward}": ("groups", "Groups whose responses all got this reward"),
        "dynamic_filter/drop_{reason}": ("groups or samples", "Dropped from training, by reason"),
        "masked/{max_len,difficulty,error_len}": (
            "",
            "Share of samples excluded by algorithm.max_len_mask, difficulty_mask and error_max_len_threshold",
        ),
        "no_signal": ("", "1 in a round without a learning signal: all rewards equal, or equal within every group"),
        "pool/{easy,normal,hard,retired}": (
            "prompts",
            "Answered prompts by difficulty, with rollout.easy_threshold, hard_threshold or retire_after",
        ),
        "waiting_groups": ("groups", "Groups kept for the next round: finished surplus, or interrupted"),
        "continued_samples": (
            "samples",
            "Samples started in an earlier round and continued in this one (partial_rollout)",
        ),
        "prompts_too_long": (
            "prompts",
            "Skipped: more than rollout.max_prompt_len tokens, no room for a response, or a token without embedding",
        ),
        "error/{category}": ("samples", "Failed attempts, by exception"),
        "staleness/{mean,max}": ("versions", "Weight versions between sampling and training"),
        "values": ("", "Mean value of sampled tokens, by the critic"),
        "returns": ("", "Mean return of sampled tokens, the critic's target"),
        "generation_time": ("s", "Generation and grading of the round, as perf/rollout_time"),
        "samples_per_second": ("1/s", "Samples per second of generation and grading"),
        "step": ("rounds", "The axis of rollout metrics"),
    }


def _eval() -> list[Metric]:
    definitions = {
        "{name}": ("", "Mean reward on the dataset"),
        "{name}_avg_reward": ("", "The same"),
        "{name}_max_reward": ("", "Largest reward"),
        "{name}_min_reward": ("", "Smallest reward"),
        "{name}/reward/{component}": ("", "Mean of a named component of the rewards, for rewards that are objects"),
        "{name}/reward/{component}/std": ("", "Its standard deviation, divided by the number of samples"),
        "{name}_samples": ("samples", "Graded responses"),
        "{name}_accuracy": ("", "Share of responses with a reward of at least eval.success_threshold"),
        "{name}_accuracy_stderr": ("", "Standard error of the accuracy over prompts, for two or more prompts"),
        "{name}_avg_reward_stderr": ("", "Standard error of the mean reward over prompts"),
        "{name}-truncated_ratio": ("", "Share of truncated responses"),
        "{name}-pass@{k}": (
            "",
            "Unbiased estimate of the probability that one of k responses is correct (arXiv:2107.03374)",
        ),
        "{name}-avg@{n}": ("", "Mean over prompts of the share of correct responses"),
        "{name}-maj@{n}": ("", "Share of prompts whose most frequent answer is correct (arXiv:2203.11171)"),
        "{name}/response_len/{mean,median,max,min}": ("tokens", "Length of responses"),
        "{name}/loss": ("nat", "Loss on held-out demonstrations or preferences, for a dataset without a verifier"),
        "{name}/pair_accuracy": ("", "Share of held-out pairs whose chosen response has the higher reward"),
        "{name}/reward_margin": ("", "Mean reward of chosen - rejected responses"),
        "{name}/{chosen,rejected}_reward": (
            "",
            "Mean reward of the chosen and of the rejected responses of held-out pairs",
        ),
        "{name}/error/{category}": ("samples", "Failed attempts, by exception. They count as wrong"),
        "{name}/no_reward": ("samples", "Skipped because every reward function returned None (score.none_reward)"),
        "{name}/prompts_too_long": ("prompts", "Skipped: no room for a response, or a token without embedding"),
        "{name}/category/{category}/share": ("", "Share of responses in this category (track.log_reward_category)"),
        "{name}/category/{category}/reward": ("", "Mean reward of responses in this category"),
        "{name}/correct_samples/count": ("samples", "Correct responses (track.log_correct_samples)"),
        "{name}/correct_samples/response_len/{mean,max,min}": ("tokens", "Length of correct responses"),
        "{name}/multi_turn/raw_response_length/{mean,max,min}": (
            "tokens",
            "Tokens after the prompt (track.log_multi_turn)",
        ),
        "{name}/multi_turn/wo_obs_response_length/{mean,max,min}": ("tokens", "Tokens that the policy wrote"),
        "{name}/multi_turn/round_number/{mean,max,min}": ("turns", "Turns of the policy"),
        "step": ("rounds", "The axis of eval metrics"),
    }
    return [Metric(f"eval/{name}", unit, "eval/step", text) for name, (unit, text) in definitions.items()]


def _perf() -> list[Metric]:
    definitions = {
        "perf/train_time": ("s", "Forward, backward and optimizer of one step, for policy and critic"),
        "perf/actor_train_time": ("s", "The same for all steps of a round, policy only"),
        "perf/critic_train_time": ("s", "The same for a separate critic"),
        "perf/rollout_time": ("s", "Generation and grading of one round"),
        "perf/update_weights_time": ("s", "Sending new weights to the engines"),
        "perf/update_weights_bytes": ("bytes", "Bytes sent"),
        "perf/update_weights_pause_time": ("s", "Part of it during which the engines were paused"),
        "perf/wait_time": ("s", "Time that training waited for a round"),
        "perf/wait_time_ratio": ("", "Share of a round's time that training waited"),
        "perf/total_time": (
            "s",
            "A whole round: waiting, training, sending weights, without evaluation and checkpoint",
        ),
        "perf/generate_time": ("s", "Generation, as part of perf/rollout_time"),
        "perf/reward_time": ("s", "Grading that generation waited for, as part of perf/rollout_time"),
        "perf/engine_onload_time": ("s", "Waking engines that share the trainer's GPUs (cluster.colocate)"),
        "perf/engine_offload_time": ("s", "Putting them to sleep"),
        "perf/log_probs_time": ("s", "The policy's pass for old log-probabilities, in rounds that need one"),
        "perf/ref_log_probs_time": ("s", "The reference's pass"),
        "perf/teacher_log_probs_time": ("s", "The teacher's pass"),
        "perf/values_time": ("s", "The critic's pass for the values of sampled tokens"),
        "perf/advantages_time": ("s", "Advantages of a round"),
        "perf/data_preprocess_time": ("s", "Filters, rows and metrics of a round, without model passes and advantages"),
        "perf/train_data_time": ("s", "Writing the training rows (run.keep_samples = train)"),
        "perf/eval_time": ("s", "One evaluation of all datasets"),
        "perf/save_model_time": ("s", "Writing a checkpoint"),
        "perf/tokens_per_gpu_per_sec": (
            "tokens/s",
            "Sampled tokens per second of generation and grading, per GPU of the engines",
        ),
        "perf/longest_sample_tokens_per_sec": ("tokens/s", "Tokens of the longest response per second of that time"),
        "perf/non_generation_time/{mean,max,min}": ("s", "Time of tools, environments and programs per attempt"),
        "perf/tokens_per_sec": ("tokens/s", "Tokens per second of the whole round, prompts included"),
        "perf/actor_train_tok_per_s": ("tokens/s", "Trained tokens per second, prompts included"),
        "perf/shared_tokens_ratio": (
            "",
            "Share of trained tokens that were computed for another sample (train.share_prompt_prefix)",
        ),
        "perf/actor_train_tflops": (
            "TFLOP/s",
            "Achieved by a rank in actor_train_time, with a vision tower, without recomputation",
        ),
        "perf/log_probs_tflops": ("TFLOP/s", "The same in log_probs_time"),
        "perf/mfu": ("", "perf/actor_train_tflops / peak of the device (data sheet or track.measure_peak)"),
        "perf/gpu_memory_allocated_gb": ("GiB", "Largest allocation of a training rank on its GPU in the round"),
        "perf/gpu_memory_reserved_gb": ("GiB", "Largest reservation of torch's allocator there"),
        "perf/gpu_memory_used_ratio": ("", "perf/gpu_memory_reserved_gb as a share of the GPU's memory"),
        "perf/pack_splits": ("packs", "Packs of the round that did not fit into memory. Absent if all did"),
        "perf/memory_used_ratio": ("", "Share of the memory of the machine, or of its control group, that is in use"),
        "perf/disk_free_gb": ("GiB", "Free space on the disk of the run at the end of the round"),
        "perf/disk_used_ratio": ("", "Share of that disk that is in use"),
        "perf/cpu_memory_gb": ("GiB", "Resident memory of the largest training process at the end of the round"),
        "perf/request/count": ("requests", "Requests to engines that ended in the round (track.timeline)"),
        "perf/request/queue_time/{mean,p50,p95,max}": ("s", "Time of a request until an engine began to work on it"),
        "perf/request/prefill_time/{mean,p50,p95,max}": ("s", "Then until its first token"),
        "perf/request/decode_time/{mean,p50,p95,max}": ("s", "Then until its last token"),
        "perf/request/e2e_time/{mean,p50,p95,max}": ("s", "The whole time of a request"),
        "perf/request/tokens_per_sec/{mean,p50,p95,max}": (
            "tokens/s",
            "Tokens of the response per second of that time",
        ),
        "perf/engines": ("engines", "Engine servers that respond at the end of the round. Absent without servers"),
        "perf/slowest_engine": ("", "Number of the engine with the longest decode time per token"),
        "perf/slowest_engine_ratio": ("", "Its decode time per token / that of the median engine"),
        "perf/slowest_rank": (
            "",
            "Number of the training rank with the most CPU time in the policy's passes, for ranks on CPUs",
        ),
        "perf/slowest_rank_ratio": ("", "Its time / that of the median rank, without waiting for other ranks"),
    }
    return [Metric(name, unit, "rollout/step", text) for name, (unit, text) in definitions.items()]


PHASES = {
    "train_step": ("perf/actor_train_time", "perf/critic_train_time"),
    "generate": ("perf/generate_time",),
    "model_update": ("perf/update_weights_time",),
    "compute_log_probs": ("perf/log_probs_time", "perf/ref_log_probs_time", "perf/teacher_log_probs_time"),
    "do_checkpoint": ("perf/save_model_time",),
    "compute_values": ("perf/values_time",),
    "compute_rewards": ("perf/reward_time",),
}
"""ROLL's phases of a round, and the metrics that add up to the time of each."""

MOVES = {"onload": {"generate": "perf/engine_onload_time"}, "offload": {"generate": "perf/engine_offload_time"}}
"""Metrics of the time that phases take to load their states onto the device and to offload them."""


def _memory() -> list[Metric]:
    """Return the memory metrics of phases under ROLL's names, used with either naming (track.log_memory)."""
    sizes, phase = "{allocated,reserved,max_allocated,max_reserved}", "{phase}"
    definitions = {
        f"memory/{phase}/{{start,end}}/{{offload,onload}}/{sizes}/{{device}}": (
            "GiB",
            "Memory of torch's allocator at the start and end of a phase, with maxima, of the largest rank",
        ),
        f"memory/{phase}/end/onload/{{max_allocated_frac,max_reserved_frac}}/{{device}}": (
            "",
            "The maxima as a share of the device's memory",
        ),
        f"memory/cpu/{phase}/{{start,end}}/{{rss,vms}}": (
            "GiB",
            "Resident and virtual memory of the largest process of a phase",
        ),
    }
    return [Metric(name, unit, "rollout/step", text, "roll") for name, (unit, text) in definitions.items()]


def _warmup() -> list[Metric]:
    same = [Metric(metric.name.replace("train/", "warmup/"), metric.unit, "warmup/step", metric.definition)
            for metric in _train()]  # fmt: skip
    definitions = {
        "accuracy": ("", "Share of correct responses when the warm-up checked"),
        "prompts_too_long": (
            "demonstrations",
            "Skipped since the previous step: too long, or a token without embedding",
        ),
    }
    return [*(Metric(f"warmup/{name}", unit, "warmup/step", text) for name, (unit, text) in definitions.items()), *same]


ROLL_NAMES = {
    "rollout/raw_reward": "critic/score/mean",
    "rollout/max_reward": "critic/score/max",
    "rollout/min_reward": "critic/score/min",
    "rollout/std_reward": "critic/score/std",
    "rollout/rewards": "critic/rewards/mean",
    "rollout/rewards/max": "critic/rewards/max",
    "rollout/rewards/min": "critic/rewards/min",
    "rollout/rewards/std": "critic/rewards/std",
    "rollout/advantages": "critic/advantages/mean",
    "rollout/advantages/max": "critic/advantages/max",
    "rollout/advantages/min": "critic/advantages/min",
    "rollout/advantages/std": "critic/advantages/std",
    "rollout/reward_clip_frac": "critic/reward_clip_frac",
    "rollout/advantage_clip_frac": "critic/advantage_clip_frac",
    "rollout/returns": "critic/returns/mean",
    "rollout/returns/max": "critic/returns/max",
    "rollout/returns/min": "critic/returns/min",
    "rollout/returns/std": "critic/returns/std",
    "rollout/values": "critic/values/mean",
    "rollout/values/max": "critic/values/max",
    "rollout/values/min": "critic/values/min",
    "rollout/values/std": "critic/values/std",
    "rollout/log_probs": "critic/old_log_prob/mean",
    "rollout/ref_log_probs": "critic/ref_log_prob/mean",
    "rollout/response_len/mean": "tokens/response_length/mean",
    "rollout/response_len/max": "tokens/response_length/max",
    "rollout/response_len/min": "tokens/response_length/min",
    "rollout/prompt_len/mean": "tokens/prompt_length/mean",
    "rollout/prompt_len/max": "tokens/prompt_length/max",
    "rollout/prompt_len/min": "tokens/prompt_length/min",
    "train/lr": "actor/lr",
    "train/loss": "actor/total_loss",
    "train/pg_loss": "actor/pg_loss",
    "train/kl_loss": "actor/kl_loss",
    "train/pg_clipfrac": "actor/clipfrac",
    "train/approxkl": "actor/approxkl",
    "train/ois": "actor/ratio_mean",
    "train/ratio_max": "actor/ratio_max",
    "train/ratio_min": "actor/ratio_min",
    "train/ratio_high_clipfrac": "actor/ppo_ratio_high_clipfrac",
    "train/ratio_low_clipfrac": "actor/ppo_ratio_low_clipfrac",
    "train/sft_loss": "actor/sft_loss",
    "train/valid_samples": "actor/valid_samples",
    "train/valid_sample_ratio": "actor/valid_sample_ratio",
    "train/grad_norm": "actor/grad_norm",
    "train/global_batch_size": "actor/total_samples",
    "train/critic-loss": "critic/loss",
    "train/critic-lr": "critic/lr",
    "train/critic-value_clipfrac": "critic/clipfrac",
    "train/critic-value": "critic/value",
    "train/critic-vpred": "critic/vpred",
    "train/critic-error": "critic/error",
    "rollout/entropy": "critic/entropy/mean",
    "train/positive_sft_loss": "actor/positive_sft_loss",
    "train/negative_sft_loss": "actor/negative_sft_loss",
    "perf/rollout_time": "time/rollout",
    "perf/advantages_time": "time/adv",
}
"""slimectl's metric names and ROLL's names for them. Metrics that ROLL computes from several are below."""


def _roll() -> list[Metric]:
    """Return the same metrics under ROLL's names."""
    ours = [*_train(), *_rollout(), *_perf()]
    metrics = []
    for name, theirs in ROLL_NAMES.items():
        same = next(metric for metric in ours if metric.matches(name))
        metrics.append(Metric(theirs, same.unit, same.axis, f"{same.definition} ({name})", "roll"))
    definitions = {
        "actor/policykl": ("nat", "train/step", "Mean of current - old log-probability"),
        "actor/ppo_ratio_clipfrac": ("", "train/step", "Share of tokens whose ratio is out of its bounds"),
        "actor/weighted_pg_loss": ("", "train/step", "Same as actor/pg_loss: samples have equal weights"),
        "time/{phase}/total": ("s", "rollout/step", "A phase, with loading and offloading its states"),
        "time/{phase}/{execute,onload,offload}": ("s", "rollout/step", "The three parts of it"),
        "time/ref_log_probs_values_reward": ("s", "rollout/step", "Passes of reference and teacher"),
        "time/old_log_probs_values": ("s", "rollout/step", "Passes of policy and critic before the first step"),
        "system/tps": ("tokens/s", "rollout/step", "Tokens per second over five rounds, prompts included"),
        "system/samples": ("prompts", "rollout/step", "Rounds times run.rollout_batch_size"),
        "val/score/{mean,max,min}": ("", "eval/step", "Rewards of all held-out responses"),
        "val/{name}/score/{mean,max,min}": ("", "eval/step", "Rewards of one dataset"),
    }
    return metrics + [Metric(name, unit, axis, text, "roll") for name, (unit, axis, text) in definitions.items()]


CATALOGUE: tuple[Metric, ...] = (*_train(), *_rollout(), *_eval(), *_perf(), *_warmup(), *_roll(), *_memory())
AXES = {"rollout": "rollout/step", "perf": "rollout/step", "eval": "eval/step", "warmup": "warmup/step"}
"""Axes of metrics that are not in the catalogue, by the first part of their name. The default is train/step."""


def known(name: str) -> bool:
    return any(metric.matches(name) for metric in CATALOGUE)


def is_evaluation_metric(name: str, datasets: Iterable[str]) -> bool:
    """Return whether `eval/name` is a metric of an evaluation of one of the datasets."""
    metrics = [metric for metric in CATALOGUE if metric.name.startswith("eval/{name}")]
    return any(
        replace(metric, name=metric.name.replace("{name}", dataset)).matches(f"eval/{name}")
        for dataset in datasets
        for metric in metrics
    )


@cache
def axis_of(name: str) -> str:
    """Return the metric that is the x-axis of `name`."""
    axis = next((metric.axis for metric in CATALOGUE if metric.matches(name)), None)
    return axis or AXES.get(name.partition("/")[0], "train/step")


def is_supervised(metrics: Mapping[str, float]) -> bool:
    """Return whether a step trained on demonstrations or pairs, so its loss shows the progress and not the reward.

    Pairs of a file have the rewards 1 and 0, whose mean says nothing.
    """
    has_reward = "rollout/raw_reward" in metrics
    return "train/pair_accuracy" in metrics or ("train/sft_loss" in metrics and not has_reward)


_RESULT = re.compile(r"eval/(?P<name>.+?)(?P<kind>_accuracy|_avg_reward|/loss|-(?:pass|maj|avg)@\d+)")
_MEASURES = {"_accuracy": "accuracy", "_avg_reward": "mean reward", "/loss": "loss"}


def evaluation_results(metrics: Mapping[str, float]) -> dict[tuple[str, str], tuple[float, float | None]]:
    """Return the (value, standard error or None) of each (dataset, measure) of an evaluation.

    >>> evaluation_results({"eval/a_accuracy": 0.5, "eval/a_accuracy_stderr": 0.1, "eval/a-pass@4": 0.8})
    {('a', 'accuracy'): (0.5, 0.1), ('a', 'pass@4'): (0.8, None)}
    """
    results = {}
    for name, value in metrics.items():
        if match := _RESULT.fullmatch(name):
            measure = _MEASURES.get(match["kind"], match["kind"].removeprefix("-"))
            results[match["name"], measure] = value, metrics.get(f"{name}_stderr")
    return results


def progress(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the name and value that show a run's progress: the mean reward, or a supervised loss."""
    if is_supervised(metrics):
        return "loss", metrics["train/loss"]
    reward = metrics.get("rollout/raw_reward")
    return None if reward is None else ("mean reward", reward)
