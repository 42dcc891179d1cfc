"""Launch files in the styles of verl, ROLL and OpenRLHF: each becomes the right settings, is refused, or asks first.

A case is a script and what follows from it by the documents of its stack: settings, the first line of what the user
must set by hand, or the refusal. What the table does not name is not compared.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.reading import read
from slimectl.migrate.launch_scripts.values import SOLUTION
from slimectl.migrate.launch_scripts.writing import settings_file

PPO = "python3 -m verl.trainer.main_ppo data.train_files=/d.parquet actor_rollout_ref.model.path=/m "
GRPO = PPO + "algorithm.adv_estimator=grpo "
DISTILL = "distillation.distillation_loss."
TEACHER = GRPO + "distillation.enabled=True distillation.teacher_models.one.model_path=/t "
GDPO = PPO + "algorithm.adv_estimator=gdpo "
SFT = "torchrun --nproc_per_node=8 -m verl.trainer.{} data.train_files=/d.parquet "
ASYNC = GRPO.replace("verl.trainer.main_ppo", "recipe.fully_async_policy.fully_async_main")
STEP_OFF = GRPO.replace("verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo")
FUNCTION = "custom_reward_function.path=/r.py "
BUFFER = "reward_model.overlong_buffer"
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
BY_SOURCE = {"score.rm_type": "by_column"}

VERL: list[tuple[str, dict[str, Any], str]] = [
    (PPO, {"algorithm.name": "ppo", **BY_SOURCE, "run.num_epoch": 30, "train.gradient_checkpointing": True,
           "train.global_batch_size": 256, "run.seed": 42, "algorithm.lambd": 1.0, "train.weight_decay": 0.01}, ""),
    (GRPO + f"{ACTOR}policy_loss.loss_mode=sapo {ACTOR}tau_neg=1.2",
     {"algorithm.name": "sapo", "algorithm.tau_neg": 1.2}, ""),
    (GRPO + f"{ROLLOUT}n=8 {ACTOR}ppo_mini_batch_size=64", {"train.global_batch_size": 512, **BY_SOURCE}, ""),
    (GRPO + "data.reward_fn_key=source", {**BY_SOURCE, "score.rm_options": {"column": "source"}}, ""),
    (GRPO + FUNCTION, {"score.custom_rm_path": "/r.py:compute_score", "score.rm_type": None}, ""),
    (GRPO + FUNCTION + "custom_reward_function.name=mine", {"score.custom_rm_path": "/r.py:mine"}, ""),
    (GRPO + "reward.custom_reward_function.path=r.py reward.custom_reward_function.name=f",
     {"score.custom_rm_path": "r.py:f"}, ""),
    ("F=$(pwd)/r.py\n" + GRPO + "custom_reward_function.path=$(cat name)", {"score.rm_type": None},
     "custom_reward_function.path"),
    (GRPO + FUNCTION + "reward_model.reward_manager=batch", {"score.custom_rm_path": "/r.py:compute_score"}, ""),
    (GRPO + FUNCTION + "+custom_reward_function.reward_kwargs.scale=2",
     {"score.custom_rm_path": "/r.py:compute_score", "custom.scale": 2}, ""),
    (GRPO + f"reward_model.reward_manager=dapo {BUFFER}.enable=True {BUFFER}.len=100 data.max_response_length=900",
     {"score.rm": [{"type": "by_column"}, {"type": "overlong", "limit": 900, "buffer": 100, "weight": 1.0}]}, ""),
    (GRPO + FUNCTION + "reward_model.reward_kwargs.max_resp_len=800 "
     + " ".join(f"reward_model.reward_kwargs.overlong_buffer_cfg.{item}" for item in
                ("enable=true", "len=50", "penalty_factor=0.5")),
     {"score.rm": [{"path": "/r.py:compute_score"}, {"type": "overlong", "limit": 800, "buffer": 50, "weight": 0.5}],
      "score.custom_rm_path": None}, ""),
    (GRPO + f"{BUFFER}.enable=False {BUFFER}.len=100", BY_SOURCE, ""),
    (GRPO + "reward_model.enable=True reward_model.model.path=/rm",
     {"score.rm_type": "reward_model", "score.rm_options": {"path": "/rm"}}, ""),
    (GRPO + "reward.reward_model.enable=True", {"score.rm_type": None}, "score.rm_options.path"),
    (GRPO + "reward_model.enable=True reward_model.model.path=/rm " + FUNCTION,
     {"score.custom_rm_path": "/r.py:compute_score"}, "reward_model.enable = True"),
    (ASYNC + "trainer.nnodes=1",
     {"algorithm.use_rollout_logprobs": True, "run.async_level": 1, "run.rollout_batch_size": 1024,
      "cluster.rollout_num_gpus": 8, "cluster.colocate": False}, ""),
    (ASYNC + "algorithm.rollout_correction.bypass_mode=False async_training.staleness_threshold=0 "
     "rollout.total_rollout_steps=4096 async_training.trigger_parameter_sync_step=2",
     {"algorithm.use_rollout_logprobs": False, "run.async_level": 0, "run.num_rollout": 8,
      "rollout.partial_rollout": True}, ""),
    (STEP_OFF + "rollout.n_gpus_per_node=2",
     {"run.async_level": 1, "algorithm.use_rollout_logprobs": True, "cluster.rollout_num_gpus": 2,
      "cluster.colocate": False}, ""),
    (SFT.format("sft_trainer") + "model.path=/m",
     {"algorithm.name": "sft", "train.lr": 1e-3, "train.global_batch_size": 256, "run.num_epoch": 4, "run.seed": 1,
      "rollout.input_key": "messages", "train.adam_beta2": 0.999, "train.lr_decay_style": "constant"}, ""),
    (SFT.format("fsdp_sft_trainer") + "model.partial_pretrain=/m optim.betas=[0.8,0.9]",
     {"algorithm.name": "sft", "train.lr": 1e-5, "train.adam_beta1": 0.8, "train.adam_beta2": 0.9,
      "train.lr_decay_style": "cosine", "train.lr_warmup_fraction": 0.1, "rollout.input_key": "question"}, ""),
    (SFT.format("fsdp_sft_trainer") + "model.path=/m data.prompt_key=extra_info data.response_key=extra_info "
     "+data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer']",
     {"rollout.input_key": "extra_info.question", "rollout.label_key": "extra_info.answer"}, ""),
    (GRPO + f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm {ACTOR}loss_scale_factor=1000",
     {"algorithm.fixed_length": 1000, "algorithm.calculate_per_token_loss": False}, ""),
    (GRPO + f"{ACTOR}loss_agg_mode=seq-mean-token-mean", {"algorithm.calculate_per_token_loss": False}, ""),
    (GRPO + f"{ACTOR}policy_loss.loss_mode=gspo {ACTOR}clip_ratio_low=3e-4 {ACTOR}clip_ratio_high=4e-4",
     {"algorithm.name": "gspo", "algorithm.eps_clip": 3e-4, "algorithm.eps_clip_high": 4e-4}, ""),
    (GRPO + f"{ACTOR}policy_loss.loss_mode=gspo", {"algorithm.eps_clip": 0.2, "algorithm.eps_clip_high": 0.2}, ""),
    (GRPO + f"{ACTOR}policy_loss.loss_mode=kl_cov", BY_SOURCE, f"{ACTOR}policy_loss.loss_mode = kl_cov"),
    (PPO + "algorithm.adv_estimator=remax", BY_SOURCE, "algorithm.adv_estimator = remax"),
    (GRPO + f"{ROLLOUT}name=sglang {ROLLOUT}gpu_memory_utilization=0.7",
     {"engine.backend": "sglang", "sglang.args": {"mem_fraction_static": 0.7}, "vllm.args": {}}, ""),
    (GRPO + "data.val_files=/e.parquet " + f"{ROLLOUT}temperature=0.9 {ROLLOUT}top_p=0.8",
     {"eval.temperature": 0.0, "eval.top_p": 1.0, "rollout.top_p": 0.8}, ""),
    (GRPO + "trainer.save_freq=10 '~trainer.logger' ++trainer.total_epochs=2",
     {"run.save_interval": 10, "run.keep_checkpoints": None, "run.num_epoch": 2, "track.with": ["stdout"]}, ""),
    (GRPO + "trainer.v1.trainer_mode=separate_async", BY_SOURCE, "trainer.v1.trainer_mode = separate_async"),
    (GRPO + "algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_rs=token_k1 "
     "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
     {"algorithm.use_tis": True, "algorithm.tis_level": "sequence", "algorithm.use_rs": True,
      "algorithm.rs_level": "token", "algorithm.rs_clip": 2.0, "algorithm.rs_clip_low": 0.5}, ""),
    (GRPO + f"{ACTOR}ppo_epochs=1 {ROLLOUT}multi_turn.enable=False distillation.enabled=False", BY_SOURCE, ""),
    (GRPO + f"{ACTOR}ppo_epochs=4", {**BY_SOURCE, "train.ppo_epochs": 4}, ""),
    (TEACHER + f"{DISTILL}use_task_rewards=False {DISTILL}loss_mode=forward_kl_topk {DISTILL}topk=32",
     {"algorithm.name": "opd", "algorithm.opd_teacher_load": "/t", "algorithm.opd_divergence": "forward_kl",
      "algorithm.opd_top_k": 32}, ""),
    (TEACHER + f"{DISTILL}loss_mode=k1 {DISTILL}topk=32",
     {"algorithm.name": "grpo", "algorithm.opd_kl_coef": 1.0, "algorithm.opd_divergence": "token"}, ""),
    (TEACHER + f"{DISTILL}use_task_rewards=False distillation.teacher_models.one.key=gsm8k "
     "distillation.teacher_models.two.model_path=/u distillation.teacher_models.two.key=geo",
     {"algorithm.opd_teacher_load": None, "rollout.domain_key": "data_source", "algorithm.opd_teachers": {
         name: {"load": load, "url": [], "api": "sglang", "domains": [domain], "weight": 1.0}
         for name, load, domain in (("one", "/t", "gsm8k"), ("two", "/u", "geo"))}}, ""),
    (TEACHER + f"{DISTILL}loss_mode=mse", {}, f"{DISTILL}loss_mode = mse"),
    (GDPO + "algorithm.gdpo_reward_keys=[right,short] algorithm.gdpo_reward_weights=[1,0.5]",
     {"algorithm.name": "gdpo", "algorithm.gdpo_weights": {"right": 1.0, "short": 0.5}}, ""),
    (GRPO + f"{ROLLOUT}multi_turn.enable=True", BY_SOURCE, f"{ROLLOUT}multi_turn.enable = True"),
    (GRPO + f"{ACTOR}use_gpg_loss=True", BY_SOURCE, f"{ACTOR}use_gpg_loss = True"),
    (GRPO + "actor_rollout_ref.ref.sync_ref_model=True", BY_SOURCE, "actor_rollout_ref.ref.sync_ref_model = True"),
    (GRPO + f"{ACTOR}kl_loss_type=other", BY_SOURCE, f"{ACTOR}kl_loss_type = other"),
    (GRPO.replace("verl.trainer.main_ppo", "agents.verl"), BY_SOURCE, "agents.verl"),
    (GRPO.replace("verl.trainer.main_ppo", "recipe.dapo.main_dapo"), BY_SOURCE, ""),
    (GRPO.replace("-m verl.trainer.main_ppo", "verl/trainer/main_ppo.py"), BY_SOURCE, ""),
]  # fmt: skip

RAY = "python3 -m openrlhf.cli.train_ppo_ray --pretrain /m --prompt_data /d.jsonl "
DOTTED = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path /m --data.prompt_dataset /d.jsonl "
RM, GROUP = "--remote_rm_url http://rm:5000/reward ", "--algo.advantage.estimator group_norm "
LEVEL = "--algo.advantage.is_correction_"
ROWS = "deepspeed --module openrlhf.cli.{} --model.model_name_or_path /m --data.dataset /d.jsonl"

OPENRLHF: list[tuple[str, dict[str, Any], str]] = [
    (RAY + RM, {"algorithm.name": "ppo", "score.rm_type": "remote_rm", "score.rm_url": "http://rm:5000/reward",
                "algorithm.kl_coef": 0.01, "algorithm.calculate_per_token_loss": True,
                "train.lr_warmup_fraction": 0.03, "train.min_lr": 1e-7, "rollout.n_samples_per_prompt": 1,
                "rollout.shuffle": True, "train.adam_beta2": 0.95}, ""),
    (RAY + RM + " --actor.lr_scheduler linear --actor.lr_warmup_ratio 0.2",
     {"train.lr_decay_style": "linear", "train.lr_warmup_fraction": 0.2, "train.min_lr": 0.0}, ""),
    (RAY, {}, "score.rm_type"),
    (RAY + "--reward_pretrain /rm", {"score.rm_type": "reward_model", "score.rm_options": {"path": "/rm"}}, ""),
    (RAY + "--remote_rm_url /r/judge.py",
     {"score.rm_type": None, "score.rm_url": None, "score.custom_rm_path": "/r/judge.py:reward_func"}, ""),
    (RAY + "--agent_func_path agent.py " + RM, {"score.rm_type": None}, "--agent_func_path agent.py"),
    (DOTTED + RM.replace("remote_rm_url", "reward.remote_url") + GROUP + "--algo.kl.use_loss",
     {"algorithm.name": "grpo", "algorithm.kl_loss_coef": 0.01, "algorithm.kl_loss_type": "k1",
      "rollout.max_context_len": 2048}, ""),
    (DOTTED + GROUP + LEVEL + "level token",
     {"algorithm.use_tis": True, "algorithm.tis_mode": "mask", "algorithm.tis_clip_low": 0.5,
      "algorithm.tis_clip": 5.0}, "score.rm_type"),
    (DOTTED + GROUP + f"{LEVEL}level token {LEVEL}mode clip {LEVEL}threshold 2.0",
     {"algorithm.tis_mode": "clip", "algorithm.tis_clip_low": 0.0, "algorithm.tis_clip": 2.0}, "score.rm_type"),
    (DOTTED + GROUP + LEVEL + "level seq",
     {"algorithm.use_rs": True, "algorithm.rs_level": "geometric", "algorithm.rs_clip_low": 0.5,
      "algorithm.rs_clip": 5.0, "algorithm.use_tis": True}, "score.rm_type"),
    (DOTTED + GROUP + f"{LEVEL}level token {LEVEL}gating tv {LEVEL}threshold 0.1", {"algorithm.use_tis": False},
     "score.rm_type"),
    (DOTTED + GROUP + "--actor.policy_loss_type gspo --actor.eps_clip 0.1",
     {"algorithm.name": "gspo", "algorithm.eps_clip": 0.1, "algorithm.eps_clip_high": 0.1,
      "algorithm.calculate_per_token_loss": False}, "score.rm_type"),
    (DOTTED + "--algo.advantage.estimator dr_grpo",
     {"algorithm.name": "dr_grpo", "algorithm.fixed_length": None, "algorithm.calculate_per_token_loss": True},
     "score.rm_type"),
    (DOTTED + "--algo.advantage.estimator flash_reinforce", {}, "score.rm_type"),
    (RAY + RM + "--enable_vllm_is_correction --vllm_is_correction_type icepop --vllm_is_truncated_threshold 0.25 4",
     {"algorithm.tis_mode": "mask", "algorithm.tis_clip_low": 0.25, "algorithm.tis_clip": 4.0}, ""),
    (RAY + RM + "--vllm_num_engines 2 --async_train --partial_rollout --colocate_all_models",
     {"run.async_level": 1, "cluster.colocate": False, "vllm.args": {"gpu_memory_utilization": 0.95}}, ""),
    (ROWS.format("train_sft"), {"algorithm.name": "sft", "train.lr": 5e-6, "run.num_epoch": 2,
                                "rollout.input_key": "input", "train.min_lr": 5e-7}, ""),
    (ROWS.format("train_dpo") + " --train.max_epochs 3",
     {"algorithm.name": "dpo", "train.lr": 1e-5, "run.num_epoch": 3, "algorithm.beta": 0.1}, ""),
    (ROWS.format("train_opd") + " --teacher.model_name_or_path /t --train.batch_size 8",
     {"algorithm.name": "opd", "run.rollout_batch_size": 8, "train.global_batch_size": 8}, ""),
    (RAY + RM + "--max_epochs 2", {"algorithm.name": "ppo", "train.ppo_epochs": 2}, ""),
    (RAY + RM + "--max_epochs 1 --dynamic_filtering_reward_range 0.0 1.0", {"algorithm.name": "ppo"}, ""),
    (RAY + RM + "--stop_properly_penalty_coef 0.0", {}, "--stop_properly_penalty_coef 0.0"),
    (RAY + RM + "--normalize_reward", {}, "--normalize_reward"),
    (RAY + RM + "--kl_estimator k3_offline", {}, "--kl_estimator k3_offline"),
    (RAY + RM + "--lora_rank 8 --target_modules q_proj,v_proj", {"train.lora_targets": ["q_proj", "v_proj"]}, ""),
    (ROWS.format("train_rm"), {"algorithm.name": "reward_model", "train.lr": 9e-6, "run.num_epoch": 1}, ""),
    (ROWS.format("train_rm") + " --model.loss_type sigmoid --model.margin_loss_enable",
     {"algorithm.name": "reward_model"}, "--model.margin_loss_enable"),
    ("python3 -m openrlhf.cli.serve_rm --reward.model_name_or_path /rm --port 5000 &\n" + RAY + RM,
     {"score.rm_type": "remote_rm"}, ""),
]  # fmt: skip

ROLL = """pretrain: /m
response_length: 256
actor_train:
  device_mapping: list(range(0,4))
  data_args: {file_name: /d.jsonl, messages: messages}
  strategy_args: {strategy_name: deepspeed_train}
actor_infer: {strategy_args: {strategy_name: vllm}, device_mapping: "list(range(0,4))"}
"""
MATH = "rewards: {math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}\n"
TWO = """rewards:
  math_rule: {worker_cls: a.MathRuleRewardWorker, tag_included: [deepmath, aime]}
  code: {worker_cls: a.CodeSandboxRewardWorker, tag_included: [KodCode]}
"""
JUDGE = "  llm: {worker_cls: a.LLMJudgeRewardWorker, tag_included: [RLVR]}\n"
OPEN = "rewards:\n  math_rule:\n    worker_cls: a.MathRuleRewardWorker\n"
OPEN_JUDGE = "rewards:\n  llm:\n    worker_cls: a.LLMJudgeRewardWorker\n    judge_model_type: api\n"
LAKE = """rollout_batch_size: 64
custom_envs: {Lake: {env_type: frozen_lake}}
train_env_manager: {tags: [Lake], group_size: 8, num_env_groups: 4}
"""


def variant(**keys: Any) -> str:
    """The configuration with keys of the trainer, which decide its loss."""
    lines = "".join(f"\n  {name}: {value}" for name, value in keys.items())
    return ROLL.replace("actor_train:", f"actor_train:{lines}") + MATH + "adv_estimator: grpo\n"


STUDENT = ROLL.replace("actor_train", "student_train") + "teacher: {model_args: {model_name_or_path: /t}}\n"
DISTIL = "student_pretrain: /s\nteacher_pretrain: /t\nexp_name: x\nmax_steps: 3\nsave_steps: 1\n"

YAML: list[tuple[str, dict[str, Any], str]] = [
    (ROLL + MATH, {"algorithm.name": "ppo", "score.rm_type": "math", "train.lr": 5e-5, "train.lr_decay_style": "linear",
                   "rollout.temperature": 0.95, "rollout.top_p": 0.7, "rollout.top_k": 50, "run.num_rollout": 500,
                   "train.global_batch_size": 32, "algorithm.value_clip": 1e6, "rollout.label_key": "ground_truth",
                   "run.keep_checkpoints": None, "algorithm.calculate_per_token_loss": False}, ""),
    (ROLL, {"score.rm_type": None}, "score.rm_type"),
    (ROLL + TWO, {"score.rm_type": "by_column", "score.rm_options": {
        "column": "tag", "types": {"deepmath": "math", "aime": "math", "KodCode": "code"}}}, "rollout.data"),
    (ROLL + TWO + JUDGE, {"score.rm_type": "by_column", "score.rm_options": {
        "column": "tag", "types": {"deepmath": "math", "aime": "math", "KodCode": "code", "RLVR": {"type": "judge"}}}},
     "score.rm_options.types.RLVR.url"),
    (ROLL + OPEN_JUDGE + "    judge_model_name: m\n    judge_api_url: http://j/v1\n    judge_api_key: sk-1\n"
     "    generating_args: {max_new_tokens: 100, temperature: 0.8, top_p: 0.8}\n",
     {"score.rm_type": "judge", "score.rm_options": {"model": "m", "url": "http://j/v1", "api_key_env": "JUDGE_API_KEY",
                                                     "max_tokens": 100, "temperature": 0.8,
                                                     "body": {"top_p": 0.8}}}, ""),
    (ROLL + "rewards: {cv: {worker_cls: a.DetectionRewardWorker}}\n", {"score.rm_type": None}, "score.rm_type"),
    (ROLL + OPEN + "    query_filter_config: {type: std_filter, filter_args: {std_threshold: 0.0}}\n"
     "max_additional_running_prompts: 8\nrollout_batch_size: 64\n",
     {"rollout.dynamic_sampling_filter_path": "slimectl.stages.filters:nonzero_std",
      "rollout.over_sampling_batch_size": 72}, ""),
    (ROLL + OPEN + "    response_length_penalty_coef: 0.1\n", {"score.rm_type": "math"},
     "rewards.math_rule.response_length_penalty_coef"),
    (ROLL + MATH + "adv_estimator: grpo\nimportance_sampling: seq\npg_clip: 0.1\n",
     {"algorithm.name": "gspo", "algorithm.eps_clip": 0.1, "algorithm.eps_clip_high": 0.1}, ""),
    (variant(pg_variant="cispo", cispo_epsilon_low=0.3),
     {"algorithm.name": "cispo", "algorithm.eps_clip": 0.3, "algorithm.eps_clip_high": 0.1}, ""),
    (variant(pg_variant="tis", tis_upper_bound=1.5),
     {"algorithm.name": "cispo", "algorithm.eps_clip": 1.0, "algorithm.eps_clip_high": 0.5}, ""),
    (variant(pg_variant="kimi15", kimi15_beta=0.1), {}, "actor_train.pg_variant: kimi15"),
    (ROLL + MATH + "adv_estimator: grpo\ntrain_infer_correction:\n  is_weight: {enabled: true, weight_type: sequence}\n"
     "  filters: [{enabled: true, agg_type: geometric, ratio_low: 0.9}, {enabled: false, agg_type: segment}]\n",
     {"algorithm.use_tis": True, "algorithm.tis_level": "sequence", "algorithm.tis_clip": 1.2, "algorithm.use_rs": True,
      "algorithm.rs_level": "geometric", "algorithm.rs_clip_low": 0.9, "algorithm.rs_clip": 1.2}, ""),
    (ROLL + MATH + "adv_estimator: grpo\ntrain_infer_correction: {filters: [{enabled: true, agg_type: segment}]}\n",
     {"algorithm.use_rs": False}, "train_infer_correction.filters.0.enabled: true"),
    (ROLL + MATH + "adv_estimator: grpo\nloss_agg_mode: seq-mean-token-sum-norm\n",
     {"algorithm.fixed_length": 256}, ""),
    (ROLL + MATH + "adv_estimator: grpo\npg_clip_high: 0.28\n", {"algorithm.name": "grpo",
                                                                 "algorithm.eps_clip_high": None}, ""),
    (ROLL + MATH + "adv_estimator: grpo\nuse_pg_clip_range: true\npg_clip_high: 0.28\ndual_clip_loss: yes\n",
     {"algorithm.eps_clip": 0.2, "algorithm.eps_clip_high": 0.28, "algorithm.eps_clip_c": 1.4}, ""),
    (ROLL + MATH + "adv_estimator: reinforce\nwhiten_advantages: true\n", {"algorithm.name": "reinforce_plus_plus"},
     ""),
    (ROLL + MATH + "adv_estimator: reinforce\n",
     {"algorithm.name": "grpo", "algorithm.norm_mean_type": "off", "algorithm.norm_std_type": "off"}, ""),
    (ROLL + MATH + "adv_estimator: reinforce\nwhiten_advantages: true\nnorm_mean_type: group\nnorm_std_type: batch\n",
     {"algorithm.name": "reinforce_plus_plus", "algorithm.norm_mean_type": "group",
      "algorithm.norm_std_type": "batch"}, ""),
    (ROLL + MATH + "adv_estimator: grpo\nnorm_mean_type: running\n",
     {"algorithm.norm_mean_type": "running", "algorithm.norm_std_type": "off"}, ""),
    (ROLL + MATH + "adv_estimator: reinforce\nreward_norm: batch\nreward_shift: true\nwhiten_advantages: true\n",
     {"algorithm.norm_mean_type": "batch", "algorithm.norm_std_type": "off"}, ""),
    (variant(pg_variant="topr", topr_negative_weight=0.5) + "whiten_advantages: true\n",
     {"algorithm.name": "topr", "algorithm.topr_negative_weight": 0.5, "algorithm.norm_mean_type": None}, ""),
    (ROLL + MATH + "adv_estimator: grpo\nreward_clip: 10\nadvantage_clip: 2.0\nppo_epochs: 2\nmax_len_mask: true\n"
     "difficulty_mask: true\ndifficulty_high_threshold: 0.9\nerror_max_len_clip: true\nerror_max_len_threshold: 99\n",
     {"algorithm.reward_clip": 10.0, "algorithm.advantage_clip": 2.0, "train.ppo_epochs": 2,
      "algorithm.max_len_mask": True, "algorithm.difficulty_mask": True, "algorithm.difficulty_low_threshold": 0.0,
      "algorithm.difficulty_high_threshold": 0.9, "algorithm.error_max_len_threshold": 99}, ""),
    (ROLL + MATH + "adv_estimator: grpo\nerror_max_len_clip: false\nerror_max_len_threshold: 99\n",
     {"algorithm.error_max_len_threshold": None}, ""),
    (ROLL + MATH + "adv_estimator: grpo\nuse_kl_loss: true\nkl_loss_coef: 0.01\ninit_kl_coef: 0.3\n",
     {"algorithm.kl_loss_coef": 0.01, "algorithm.kl_coef": 0.0}, ""),
    (ROLL.replace("response_length: 256", "sequence_length: 3000\nprompt_length: 1000") + MATH,
     {"rollout.max_response_len": 2000, "rollout.max_prompt_len": 1000, "rollout.max_context_len": 3000}, ""),
    (ROLL + LAKE, {"rollout.n_samples_per_prompt": 8, "run.rollout_batch_size": 8,
                   "rollout.env": "gymnasium:FrozenLake-v1"}, ""),
    (ROLL + LAKE.replace("frozen_lake", "webshop"), {"rollout.env": None}, "rollout.env"),
    (ROLL + LAKE + "adv_estimator: gigpo\nstep_reward_weight: 0.5\nreward_normalization: {method: mean}\n",
     {"algorithm.name": "gigpo", "algorithm.turn_gamma": 0.95, "algorithm.step_reward_weight": 0.5,
      "algorithm.grpo_std_normalization": False}, ""),
    (ROLL + LAKE + "adv_estimator: agentic_reinforce\nwhiten_advantages: true\n",
     {"algorithm.name": "step_reinforce", "algorithm.turn_gamma": 1.0}, ""),
    (ROLL + LAKE + "adv_estimator: grpo\nreward_normalization: {grouping: tags, method: asym_clip}\n", {},
     "reward_normalization.method: asym_clip"),
    (ROLL + LAKE + "adv_estimator: grpo\nreward_normalization: {grouping: batch, method: mean_std}\n",
     {"algorithm.norm_mean_type": "batch", "algorithm.norm_std_type": "batch"}, ""),
    (ROLL + LAKE + "adv_estimator: grpo\nreward_normalization: {grouping: traj_group_id, method: mean}\n",
     {"algorithm.name": "grpo", "algorithm.grpo_std_normalization": False}, ""),
    (ROLL.replace("list(range(0,4))\n", "${devices}\n") + MATH, {"train.global_batch_size": None},
     "actor_train.device_mapping: ${devices}"),
    (ROLL.replace("actor_train:", "actor_train:\n  model_args: {lora_rank: 4, lora_target: 'o_proj, q_proj'}") + MATH,
     {"train.lora_targets": ["o_proj", "q_proj"], "train.lora_rank": 4}, ""),
    (ROLL.replace("actor_train", "sft_train"), {"algorithm.name": "sft", "run.num_epoch": 1, "run.num_rollout": None,
                                               "train.global_batch_size": 32}, ""),
    (ROLL + "beta: 0.2\nchosen_key: chosen\n", {"algorithm.name": "dpo", "algorithm.beta": 0.2}, ""),
    (STUDENT, {"algorithm.name": "opd", "algorithm.opd_teacher_load": "/t"}, ""),
    (STUDENT + "opsd_mode: true\nopsd_solution_key: worked\n",
     {"algorithm.name": "opd", "algorithm.opd_teacher_load": "/t", "algorithm.opd_self_teacher": None,
      "algorithm.opd_teacher_template": SOLUTION.format("worked")}, ""),
    (STUDENT.replace("/t}", "'${pretrain}'}") + "opsd_mode: true\n",
     {"algorithm.opd_self_teacher": "start", "algorithm.opd_teacher_load": None,
      "algorithm.opd_teacher_template": SOLUTION.format("solution")}, ""),
    (ROLL.replace("messages}", "messages, interleave_probs: '0.3,0.7', domain_interleave_probs: {a: 0.75, b: 0.25}}")
     .replace("/d.jsonl", "[/d.jsonl, /e.jsonl]") + "rewards:\n"
     + "".join(f"  {domain}: {{worker_cls: x.MathRuleRewardWorker, tag_included: [{domain}1]}}\n" for domain in "ab"),
     {"rollout.domain_weights": {"a1": 0.75, "b1": 0.25}, "rollout.domain_key": "tag"}, ""),
    (ROLL.replace("messages}", "messages, domain_interleave_probs: {math_rule: 0.75, code: 0.25}}") + TWO,
     {"rollout.domain_weights": {"math_rule": 0.75, "code": 0.25}, "rollout.domain_key": "domain"}, "rollout.data"),
    (ROLL.replace("messages}", "messages, domain_interleave_probs: {math_rule: 1.0}}") + MATH,
     {"rollout.domain_weights": {}}, ""),
]  # fmt: skip
CASES = [(text, "run.sh", *rest) for text, *rest in [*VERL, *OPENRLHF]] + [
    (text, "run.yaml", *rest) for text, *rest in YAML
]


@pytest.mark.parametrize(("text", "name", "expected", "first"), CASES)
def test_a_launch_file_becomes_the_settings_that_its_stack_documents(
    text: str, name: str, expected: dict[str, Any], first: str, tmp_path: Path
):
    (tmp_path / name).write_text(text, encoding="utf-8")
    reading = read(tmp_path / name, environ={})
    conversion = reading.conversion
    sections = conversion.settings.model_dump(by_alias=True)
    actual = {key: sections[key.partition(".")[0]][key.partition(".")[2]] for key in expected}
    assert actual == expected
    assert conversion.problems == []
    written = settings_file(conversion, tmp_path / name, reading.notes)
    assert [name for name, flag in conversion.flags.items() if flag.spelling.rstrip(" =:") not in written] == []
    by_hand = [omission.flag for omission in conversion.omissions if omission.by_hand]
    assert bool(by_hand) == bool(first)
    assert (by_hand[0] if by_hand else "").startswith(first)


REFUSED = [
    ("python -m verl.trainer.main_eval data.path=/d.parquet", "run.sh", "`slimectl score`"),
    ("python -m verl.trainer.main_generation data.path=/d.parquet", "run.sh", "`slimectl rollout`"),
    ("python -m verl.trainer.main_generation_server data.path=/d.parquet", "run.sh", "`slimectl rollout`"),
    ("python -m recipe.prime.main_prime data.train_files=/d x=rloo", "run.sh", "of single tokens"),
    ("python -m recipe.spin.main_spin data.train_files=/d", "run.sh", "pairs that it samples"),
    ("deepspeed --module openrlhf.cli.train_kto --pretrain /m --dataset /d", "run.sh", "learns from pairs"),
    ("deepspeed --module openrlhf.cli.train_kd --pretrain /m --dataset /d", "run.sh", "asks a teacher"),
    ("deepspeed --module openrlhf.cli.train_prm --pretrain /m --dataset /d", "run.sh", "grades single steps"),
    ("python -m openrlhf.cli.serve_rm --reward.model_name_or_path /m", "run.sh", "serves a reward model"),
    ("python -m openrlhf.cli.batch_inference --pretrain /m --dataset /d", "run.sh", "`slimectl rollout`"),
    ("python -m openrlhf.cli.lora_combiner --model_path /m --lora_path /l", "run.sh", "`slimectl convert`"),
    ("python -m openrlhf.cli.interactive_chat --pretrain /m", "run.sh", "samples responses"),
    ("python -m openrlhf.cli.train_xyz --pretrain /m --dataset /d", "run.sh", "openrlhf.cli.train_xyz is not known"),
    ("python examples/start_distill_pipeline.py --config_path c --config_name n", "run.sh", "distils from a teacher"),
    ("python examples/start_agentic_rollout_pipeline.py --config_path c --config_name n", "run.sh", "trains nothing"),
    (DISTIL, "run.yaml", "student_pretrain has no counterpart"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "reason"), REFUSED)
def test_a_program_with_another_purpose_is_refused_in_one_line(text: str, name: str, reason: str, tmp_path: Path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as error:
        read(tmp_path / name, environ={})
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / name}:")


def test_a_list_of_defaults_is_read_from_files_beside_the_configuration(tmp_path: Path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "envs.yaml").write_text("max_actions_per_traj: 7\nresponse_length: 99\nseed: 3\n")
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "small.yaml").write_text(
        "training_args: {learning_rate: 2e-6, warmup_steps: '${.steps}', steps: 5}"
    )
    head = "defaults:\n  - config/envs@_here_\n  - group@actor_train: small\n  - ../zero@_here_\n  - _self_\n"
    (tmp_path / "run.yaml").write_text(head + ROLL + MATH)
    result = read(tmp_path / "run.yaml", environ={})
    settings = result.conversion.settings
    assert (settings.run.seed, settings.rollout.max_response_len) == (3, 256)  # the file's own 256 replaces 99
    assert (settings.train.lr, settings.train.lr_warmup_iters) == (2e-6, 5)
    assert "defaults: ../zero (run.yaml:4)" in settings_file(result.conversion, tmp_path / "run.yaml", [])


def test_a_configuration_of_verl_with_references_is_read(tmp_path: Path):
    text = """defaults: [ppo_trainer, _self_]
data: {train_files: /d, max_response_length: 64}
actor_rollout_ref:
  model: {path: /m}
  actor: {ppo_mini_batch_size: 8, optim: {lr: 1e-5}}
  rollout: {n: "${oc.select:group,4}", response_length: "${data.max_response_length}", seed: "${.n}"}
algorithm: {adv_estimator: grpo}
"""
    (tmp_path / "run.yaml").write_text(text)
    settings = read(tmp_path / "run.yaml", environ={}).conversion.settings
    assert (settings.rollout.n_samples_per_prompt, settings.train.global_batch_size) == (4, 32)
    assert (settings.rollout.max_response_len, settings.run.seed) == (64, 4)


def test_the_reward_is_the_first_line_by_hand_in_the_file_and_on_stderr(tmp_path: Path):
    (tmp_path / "run.sh").write_text(f"{RAY}--num_episodes $(nproc)\n")
    command = [sys.executable, "-m", "slimectl", "settings", "from", str(tmp_path / "run.sh")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = result.stdout.split("# To be set by hand: ")[1].partition("\n")[2].splitlines()
    assert lines[0].startswith("#   score.rm_type: the file has no reward.")
    assert lines[1].startswith("#   --num_episodes")
    warnings = result.stderr.splitlines()
    assert "score.rm_type: the file has no reward" in warnings[0]
    assert "--num_episodes" in warnings[1]
