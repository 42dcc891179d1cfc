"""Of every setting: a value, and the observation in which its effect is seen (observed.py).

A row is see(OBSERVATION, VALUE, other settings): the lines that are observed differ with and without the value.
`refused` says that the value is refused where it cannot act, `unlocks` that the observation is refused without it, and
`elsewhere` names the test that shows the effect where other processes, or a function of the user's, are needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from settings.observed import (
    asked,
    distilled,
    evaluated,
    graded,
    graded_by_name,
    installed,
    launched,
    on_megatron,
    placed,
    pushed,
    questions,
    ran,
    read,
    referred,
    sampled,
    served,
    stale,
    tracked,
    trained,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A value of a setting and the observation that shows its effect, or the words or test that stand for it."""

    observation: Any = None
    value: Any = None
    beside: dict[str, Any] = field(default_factory=dict)
    words: str = ""
    test: str = ""
    unlocks: bool = False


def see(observation: Any, value: Any, **beside: Any) -> Row:
    """The effect is a difference of the observation; `a__b` in `beside` is the setting a.b."""
    return Row(observation, value, {name.replace("__", "."): each for name, each in beside.items()})


def refused(observation: Any, value: Any, words: str, **beside: Any) -> Row:
    """The value is refused where it could not act, with these words."""
    return Row(observation, value, see(None, None, **beside).beside, words=words)


def unlocks(observation: Any, value: Any, words: str, **beside: Any) -> Row:
    """Without the value the observation is refused with these words."""
    return Row(observation, value, see(None, None, **beside).beside, words=words, unlocks=True)


def elsewhere(test: str, word: str = "") -> Row:
    """The test, as FILE::NAME, whose source has the last part of the setting's name, or this word for it."""
    return Row(test=test, words=word)


MEANS_THE_SAME = "weight_sync/test_delta_files.py::test_every_value_of_the_settings_is_accepted"
POOLS = "data/test_difficulty_pools.py::"
HOOKS = "hooks/test_examples.py::test_what_a_hook_changes_in_a_run"
NO_GPU = "device: cuda is requested, but torch sees no GPU"
SERVERS = {"engine__num_engines": 2}
SGLANG = {"engine__backend": "sglang"}
ON_RAY = "stages/test_servers.py::test_local_equals_ray"
LORA = {"train__lora_rank": 2}
MEGATRON = {"train__backend": "megatron"}
DELTA = {**SERVERS, "sync__transport": "delta"}
WANDB = {"track__with": ["wandb"]}
DATA = {"rollout__data": ["{folder}/prompts.jsonl"]}
ROUND = {
    **DATA, "score__custom_rm_path": "{folder}/own.py:reward", "run__num_rollout": 2, "run__rollout_batch_size": 2,
    "rollout__n_samples_per_prompt": 2, "rollout__max_response_len": 6, "rollout__apply_chat_template": False,
    "train__lr": 1e-2,
}  # fmt: skip
EVALUATED = {**ROUND, "eval__data": {"small": "{folder}/prompts.jsonl@[0:2]"}}
JSONL = {**EVALUATED, "track__with": ["jsonl"]}
WARM = {**ROUND, "sft_warmup__data": "{folder}/prompts.jsonl", "sft_warmup__max_steps": 2, "run__num_rollout": 1,
        "sft_warmup__batch_size": 2, "sft_warmup__check_interval": 1, "sft_warmup__target_accuracy": 1.0}  # fmt: skip
ONE_ANSWER = {"rollout__n_samples_per_prompt": 1, "rollout__apply_chat_template": False}


def sampling(value: Any, **beside: Any) -> Row:
    return see(sampled, value, **{**DATA, "rollout__max_response_len": 8, **ONE_ANSWER, **beside})


def training(value: Any, **beside: Any) -> Row:
    return see(trained, value, **beside)


def evaluating(value: Any, **beside: Any) -> Row:
    return see(evaluated, value, **{**EVALUATED, **beside})


def asking(value: Any) -> Row:
    return see(questions, value, **EVALUATED)


def dataset(**own: Any) -> dict[str, Any]:
    """[eval.data.small] with settings of its own."""
    return {"small": {"path": "{folder}/prompts.jsonl@[0:2]", **own}}


def running(value: Any, **beside: Any) -> Row:
    return see(ran, value, **{**ROUND, **beside})


ROWS: dict[str, Row] = {
    "model.path": see(sampled, "{folder}/other", **DATA, **ONE_ANSWER),
    "model.verify": elsewhere("data/test_integrity.py::"),
    "model.card": running("tiny", model__path=None, run__num_rollout=1),
    "engine.backend": see(served, "sglang", **SERVERS),
    "engine.load": elsewhere("weight_sync/test_quantized_pushes.py::"),
    "engine.dtype": sampling("bfloat16"),
    "engine.compile_kernels": see(served, False, **SERVERS),
    "engine.device": refused(sampled, "cuda", NO_GPU, **DATA, **ONE_ANSWER),
    "engine.max_running_requests": see(served, 3, **SERVERS),
    "engine.prefix_cache_gib": see(served, 0.5, **SERVERS),
    "engine.url": see(placed, ["http://a:1"], engine__backend="sglang", train__device="cuda"),
    "engine.api_key": see(asked, "a-key-of-mine", **SERVERS),
    "engine.admin_api_key": see(asked, "a-key-of-mine", **SERVERS),
    "engine.num_engines": see(placed, 2, train__device="cuda"),
    "engine.router": see(served, "random", **SERVERS),
    "engine.middleware_paths": see(served, ["own.py:seen"], **SERVERS),
    "engine.session_affinity": see(asked, False, **SERVERS),
    "engine.server_concurrency": see(asked, 7, **SERVERS),
    "engine.request_timeout_s": see(asked, 7.0, **SERVERS),
    "engine.connect_timeout_s": see(asked, 7.0, **SERVERS),
    "engine.start_timeout_s": see(served, 7.0, **SERVERS),
    "engine.use_fault_tolerance": see(served, False, **SERVERS),
    "engine.health_check_interval": see(served, 7.0, **SERVERS),
    "engine.health_check_timeout": see(served, 7.0, **SERVERS),
    "engine.health_check_first_wait": see(served, 7.0, **SERVERS),
    "engine.max_restarts": see(served, 7, **SERVERS),
    "sglang.python": refused(installed, "/no/such/python", "/no/such/python", **SGLANG),
    "sglang.args": see(served, {"mem_fraction_static": 0.5}, **SGLANG),
    "sglang.prefill_num_servers": see(served, 1, **SGLANG, engine__num_engines=2),
    "sglang.server_groups": see(served, [{"name": "a", "num_engines": 3}], **SGLANG),
    "vllm.python": refused(installed, "/no/such/python", "/no/such/python", engine__backend="vllm"),
    "vllm.args": see(served, {"max_num_seqs": 3}, engine__backend="vllm"),
    "rollout.data": see(read, ["{folder}/prompts.jsonl@[1:2]"], **DATA),
    "rollout.domain_weights": see(read, {"even": 1.0}, **DATA, rollout__domain_key="kind"),
    "rollout.easy_threshold": elsewhere(POOLS),
    "rollout.hard_threshold": elsewhere(POOLS),
    "rollout.easy_fraction": elsewhere(POOLS),
    "rollout.hard_fraction": elsewhere(POOLS),
    "rollout.retire_after": elsewhere(POOLS),
    "rollout.data_weights": see(read, [1.0, 3.0], rollout__data=["{folder}/prompts.jsonl", "{folder}/other.jsonl"]),
    "rollout.input_key": see(read, "label", **DATA),
    "rollout.label_key": see(read, "kind", **DATA),
    "rollout.metadata_key": see(read, "facts", **DATA),
    "rollout.tool_key": see(read, "instruments", **DATA),
    "rollout.image_key": elsewhere("data/test_images.py::test_bytes_stay_base64_and_another_key_can_name_the_column"),
    "rollout.apply_chat_template": sampling(True),
    "rollout.apply_chat_template_kwargs": sampling({"loud": True}, rollout__apply_chat_template=True,
                                                   model__path="{folder}/other"),
    "rollout.template_date": elsewhere("builders/test_template_date.py::test_a_date_that_is_printed_is_pinned"),
    "rollout.shuffle": see(read, True, **DATA),
    "rollout.seed": sampling(7),
    "rollout.n_samples_per_prompt": sampling(3),
    "rollout.temperature": sampling(0.5),
    "rollout.top_p": sampling(0.2),
    "rollout.top_k": sampling(2),
    "rollout.min_p": sampling(0.5),
    "rollout.repetition_penalty": sampling(2.0),
    "rollout.presence_penalty": sampling(2.0),
    "rollout.frequency_penalty": sampling(2.0),
    "rollout.max_response_len": sampling(3),
    "rollout.min_new_tokens": sampling(8, rollout__stop_token_ids=list(range(128))),
    "rollout.max_context_len": sampling(12),
    "rollout.stop": sampling([chr(letter) for letter in range(32, 127)]),
    "rollout.stop_token_ids": sampling(list(range(128))),
    "rollout.ignore_eos": sampling(True, rollout__max_response_len=200, rollout__data=["{folder}/prompts.jsonl@[0:1]"],
                                   rollout__n_samples_per_prompt=4),
    "rollout.skip_special_tokens": sampling(False, rollout__ignore_eos=True, rollout__max_response_len=200),
    "rollout.max_prompt_len": sampling(12),
    "rollout.over_sampling_batch_size": running(3),
    "rollout.domain_key": elsewhere("stages/test_teachers.py::", "domain"),
    "rollout.top_log_probs": elsewhere("stages/test_teachers.py::"),
    "rollout.dynamic_sampling_filter_path": elsewhere(HOOKS),
    "rollout.buffer_filter_path": elsewhere(HOOKS),
    "rollout.partial_rollout": running(True, rollout__over_sampling_batch_size=3, run__keep_samples=True,
                                       rollout__max_response_len=40, engine__max_running_requests=4),
    "rollout.mask_offpolicy_in_partial_rollout": elsewhere("stages/test_leftovers.py::"),
    "rollout.custom_generate_function_path": elsewhere(HOOKS),
    "rollout.agent": elsewhere("agents/test_agent_runs.py::"),
    "rollout.max_failed": elsewhere("stages/test_hooks_in_stages.py::test_too_many_failed_attempts"),
    "rollout.agent_timeout_s": elsewhere("agents/test_command.py::", "timeout_s="),
    "rollout.agent_max_turns": elsewhere("agents/test_command.py::", "max_turns="),
    "rollout.agent_retries": elsewhere("agents/test_command.py::", "retries="),
    "rollout.agent_concurrency": elsewhere("agents/test_command.py::", "concurrency="),
    "rollout.agent_model": elsewhere("agents/test_command.py::", "model="),
    "rollout.env": elsewhere("environments/test_environment_runs.py::"),
    "rollout.env_args": elsewhere("environments/test_environment_runs.py::"),
    "rollout.env_python": elsewhere("environments/test_episodes.py::test_a_package_that_is_missing"),
    "rollout.env_timeout_s": elsewhere("environments/test_environment_runs.py::"),
    "rollout.env_max_turns": elsewhere("environments/test_environment_runs.py::"),
    "rollout.env_turn_tokens": elsewhere("environments/test_environment_runs.py::"),
    "rollout.env_retries": elsewhere("environments/test_environment_runs.py::"),
    "rollout.env_concurrency": elsewhere("environments/test_episodes.py::", "concurrency="),
    "rollout.allow_paths_in_records": elsewhere("hooks/test_examples.py::test_a_sample_may_name_its_own_generate"),
    "rollout.tool_timeout_s": elsewhere("stages/test_tool_time.py::"),
    "rollout.function_path": elsewhere(HOOKS),
    "rollout.data_source_path": elsewhere(HOOKS),
    "rollout.sample_hook_path": elsewhere(HOOKS),
    "rollout.sample_filter_path": elsewhere(HOOKS),
    "rollout.all_samples_process_path": elsewhere(HOOKS),
    "rollout.data_postprocess_path": elsewhere(HOOKS),
    "score.rm_type": see(graded, "contains", score__rm_type="exact"),
    "score.rm_options": see(graded, {"pattern": "Answer: (.*)"}, score__rm_type="regex"),
    "score.rm": see(graded, [{"type": "contains", "weight": 0.5}], score__rm=[{"type": "contains", "weight": 1.0}]),
    "score.custom_rm_path": elsewhere(HOOKS),
    "score.allow_paths_in_records": unlocks(graded_by_name, True, "records may not choose the code to run"),
    "score.custom_reward_post_process_path": elsewhere(HOOKS),
    "score.none_reward": unlocks(graded, "skip", "None, not a finite number",
                                 score__custom_rm_path="{folder}/own.py:silent"),
    "score.group_rm": see(graded, True, score__custom_rm_path="{folder}/own.py:sizes"),
    "score.batch_size": see(graded, 3, score__custom_rm_path="{folder}/own.py:sizes"),
    "score.rm_url": elsewhere("rewards/test_remote_rm.py::"),
    "score.concurrency": elsewhere("rewards/test_remote_rm.py::"),
    "score.reward_key": training("other", score__reward_key="score"),
    "score.explain": see(graded, True, score__rm_type="contains"),
    "score.timeout_s": elsewhere("stages/test_time_limits.py::"),
    "score.wall_timeout_s": elsewhere("stages/test_time_limits.py::"),
    "score.workers": elsewhere("stages/test_grader.py::"),
    "train.backend": training("megatron"),
    "train.lr": training(0.5),
    "train.lr_decay_style": training("linear", run__num_rollout=2),
    "train.lr_warmup_iters": training(3),
    "train.lr_warmup_fraction": training(0.5, run__num_rollout=2),
    "train.lr_wsd_decay_iters": training(4, train__lr_decay_style="WSD", train__lr_decay_iters=4, run__num_rollout=2),
    "train.lr_wsd_decay_style": training("linear", train__lr_decay_style="WSD", train__lr_decay_iters=4,
                                         train__lr_wsd_decay_iters=4, run__num_rollout=2),
    "train.lr_decay_iters": training(3, train__lr_decay_style="cosine", run__num_rollout=2),
    "train.min_lr": training(0.01, train__lr_decay_style="linear", train__lr_decay_iters=3),
    "train.weight_decay": training(0.5),
    "train.adam_beta1": training(0.1),
    "train.adam_beta2": training(0.5),
    "train.adam_eps": training(0.1),
    "train.clip_grad": training(1e-3, train__adam_eps=0.1),
    "train.global_batch_size": training(6, train__num_steps_per_rollout=None),
    "train.ppo_epochs": training(2),
    "train.num_steps_per_rollout": training(4),
    "train.max_tokens_per_gpu": training(20),
    "train.use_dynamic_batch_size": training(False),
    "train.micro_batch_size": training(3, train__use_dynamic_batch_size=False),
    "train.balance_data": elsewhere("builders/test_batching.py::"),
    "train.balance_by_flops": elsewhere("builders/test_batching.py::"),
    "train.dtype": training("bfloat16"),
    "train.device": refused(trained, "cuda", NO_GPU),
    "train.deterministic": elsewhere("policies/test_determinism.py::"),
    "train.freeze_params_name_list": training(["embed"]),
    "train.freeze_vision_tower": elsewhere("policies/test_vision.py::test_two_ranks_equal_one"),
    "train.only_train_params_name_list": training(["layers"]),
    "train.custom_advantage_function_path": elsewhere(HOOKS),
    "train.custom_loss_function_path": elsewhere(HOOKS),
    "train.custom_tis_function_path": elsewhere(HOOKS),
    "train.custom_pg_loss_reducer_function_path": elsewhere(HOOKS),
    "train.custom_convert_samples_to_train_data_path": elsewhere(HOOKS),
    "train.lora_rank": training(2),
    "train.lora_alpha": training(9.0, **LORA),
    "train.lora_targets": training(["q_proj"], **LORA),
    "train.lora_load": training("{folder}/tuned/adapter", **LORA),
    "train.optimizer": training("muon"),
    "train.muon_momentum": training(0.5, train__optimizer="muon"),
    "train.muon_use_nesterov": training(False, train__optimizer="muon"),
    "train.muon_num_ns_steps": training(2, train__optimizer="muon"),
    "train.optimizer_state_dtype": training("bfloat16"),
    "train.reset_optimizer_states": elsewhere("stages/test_train_stage.py::"),
    "train.no_save_optim": elsewhere("policies/test_saving.py::", "saves_moments"),
    "train.no_load_optim": elsewhere("policies/test_saving.py::", "loads_moments"),
    "run.async_save": elsewhere("runtime/test_background_save.py::"),
    "train.offload": elsewhere("policies/test_fsdp.py::"),
    "train.recompute_granularity": see(on_megatron, "selective", **MEGATRON),
    "train.recompute_modules": see(on_megatron, ["mlp"], **MEGATRON, train__recompute_granularity="selective"),
    "train.gradient_checkpointing": see(on_megatron, True, **MEGATRON),
    "train.share_prompt_prefix": elsewhere("policies/test_fsdp.py::", "share_prefixes"),
    "train.use_rollout_routing_replay": elsewhere("stages/test_rollout_routing.py::", "use_rollout_routing_replay"),
    "megatron.tensor_model_parallel_size": see(on_megatron, 2, **MEGATRON, cluster__actor_num_gpus_per_node=2),
    "megatron.pipeline_model_parallel_size": see(on_megatron, 2, **MEGATRON, cluster__actor_num_gpus_per_node=2),
    "megatron.virtual_pipeline_model_parallel_size": see(
        on_megatron, 2, **MEGATRON, cluster__actor_num_gpus_per_node=2, megatron__pipeline_model_parallel_size=2
    ),
    "megatron.context_parallel_size": see(on_megatron, 2, **MEGATRON, cluster__actor_num_gpus_per_node=2),
    "megatron.expert_model_parallel_size": see(
        on_megatron, 2, **MEGATRON, cluster__actor_num_gpus_per_node=2, model__path="{folder}/experts"
    ),
    "megatron.expert_tensor_parallel_size": see(
        on_megatron, 2, **MEGATRON, cluster__actor_num_gpus_per_node=2, model__path="{folder}/experts"
    ),
    "megatron.use_distributed_optimizer": see(on_megatron, False, **MEGATRON),
    "megatron.optimizer_cpu_offload": elsewhere("policies/megatron/test_policy.py::test_what_saves_memory"),
    "megatron.recompute_granularity": see(on_megatron, "selective", **MEGATRON),
    "megatron.recompute_modules": see(on_megatron, ["mlp"], **MEGATRON, megatron__recompute_granularity="selective"),
    "megatron.use_routing_replay": elsewhere("policies/megatron/test_routers.py::", "routing_replay"),
    "megatron.save_format": elsewhere("policies/megatron/test_megatron_torch_dist.py::"),
    "megatron.custom_model_provider_path": elsewhere(HOOKS),
    "megatron.custom_init_path": elsewhere(HOOKS),
    "megatron.custom_before_log_prob_hook_path": elsewhere(HOOKS),
    "megatron.custom_before_train_step_hook_path": elsewhere(HOOKS),
    "megatron.args": see(on_megatron, {"softmax_scale": 0.5}, **MEGATRON),
    "eval.data": running(dataset()),
    "eval.interval": see(ran, 1, **EVALUATED),
    "eval.before_train": see(ran, False, **EVALUATED),
    "eval.n_samples_per_prompt": evaluating(2),
    "eval.temperature": evaluating(0.1, eval__max_response_len=20),
    "eval.top_p": evaluating(0.1, eval__max_response_len=20),
    "eval.top_k": evaluating(1, eval__max_response_len=20),
    "eval.repetition_penalty": evaluating(2.0, eval__max_response_len=20),
    "eval.presence_penalty": evaluating(-2.0, eval__max_response_len=20),
    "eval.frequency_penalty": evaluating(-2.0, eval__max_response_len=20),
    "eval.max_response_len": evaluating(2),
    "eval.min_new_tokens": evaluating(6, rollout__stop_token_ids=list(range(128))),
    "eval.rm_type": evaluating("exact"),
    "eval.reward_key": evaluating("low", score__custom_rm_path="{folder}/own.py:two", score__reward_key="high"),
    "eval.success_threshold": evaluating(-1.0),
    "eval.keep_samples": see(ran, False, **EVALUATED),
    "sft_warmup.data": running("{folder}/prompts.jsonl", run__num_rollout=1, score__custom_rm_path=None,
                               score__rm_type="exact"),
    "sft_warmup.target_accuracy": see(ran, 0.0, **WARM),
    "sft_warmup.check_interval": see(ran, 2, **WARM),
    "sft_warmup.max_steps": see(ran, 1, **WARM),
    "sft_warmup.batch_size": see(ran, 3, **WARM),
    "sft_warmup.lr": see(ran, 0.1, **WARM),
    "sync.transport": see(pushed, "delta", **SERVERS),
    "sync.lora": see(pushed, "merged", **SERVERS, **LORA),
    "sync.update_weights_interval": running(2, run__num_rollout=3),
    "sync.update_weight_buffer_size": see(pushed, 7, **SERVERS, sync__transport="tensor"),
    "sync.update_weight_disk_dir": see(pushed, "{folder}/pushes", **DELTA),
    "sync.update_weight_disk_keep_files": see(pushed, True, **DELTA),
    "sync.update_weight_delta_encoding": elsewhere(MEANS_THE_SAME, "encoding"),
    "sync.update_weight_delta_checksum": elsewhere(MEANS_THE_SAME, "checksum"),
    "sync.custom_post_write_path": elsewhere("contracts/test_sync_contract.py::test_a_function_of_the_users"),
    "sync.check_weight_update_equal": see(pushed, True, **DELTA),
    "sync.pause_mode": see(pushed, "abort", **DELTA),
    "sync.timeout_s": see(served, 7.0, **SERVERS),
    "run.name": running("mine", run__num_rollout=1),
    "run.dir": running("mine", run__num_rollout=1),
    "run.num_rollout": running(1),
    "run.num_epoch": running(2, run__num_rollout=None, rollout__data=["{folder}/prompts.jsonl@[0:2]"]),
    "run.rollout_batch_size": running(3, train__num_steps_per_rollout=2),
    "run.async_level": running(1),
    "run.max_staleness": see(stale, 1, run__async_level=1),
    "run.seed": training(7, **LORA),
    "run.save_interval": running(1),
    "run.save_best": running("small", eval__data={"small": "{folder}/prompts.jsonl@[0:2]"}, eval__interval=1),
    "run.early_stop_patience": elsewhere("stages/test_best.py::test_the_best_checkpoint"),
    "run.keep_checkpoints": running(1, run__save_interval=1),
    "run.keep_samples": running(True),
    "run.profile": running([1, 1]),
    "run.grace_s": elsewhere("stages/test_signals.py::"),
    "run.stall_timeout": elsewhere("runtime/test_stalls.py::"),
    "run.max_restarts": elsewhere("stages/test_faults.py::"),
    "run.max_reward_timeouts": elsewhere("stages/test_time_limits.py::"),
    "run.max_logprob_mismatch": running(1e-12),
    "run.on_logprob_mismatch": running("stop", run__max_logprob_mismatch=1e-12),
    "run.on_finding": running("stop", score__custom_rm_path="{folder}/own.py:always", run__no_signal_rounds=1),
    "run.on_no_signal": running("stop", score__custom_rm_path="{folder}/own.py:always", run__no_signal_rounds=1),
    "run.on_data_change": elsewhere("cli/test_resume_elsewhere.py::test_changed_data"),
    "run.no_signal_rounds": running(1, score__custom_rm_path="{folder}/own.py:always"),
    "track.with": see(tracked, ["jsonl"]),
    "track.kwargs": see(tracked, {"tensorboard": {"log_dir": "{folder}/curves"}}, track__with=["tensorboard"]),
    "track.naming": see(tracked, "roll", track__with=["jsonl"]),
    "track.project": see(tracked, "mine", **WANDB),
    "track.entity": see(tracked, "mine", **WANDB),
    "track.group": see(tracked, "mine", **WANDB),
    "track.mode": see(tracked, "disabled", track__with=["wandb"]),
    "track.dir": see(tracked, "{folder}/curves", **WANDB),
    "track.host": see(tracked, "http://127.0.0.1:9", **WANDB),
    "track.api_key": see(tracked, "a-key-of-mine", **WANDB),
    "track.prometheus_port": elsewhere("trackers/test_prometheus.py::"),
    "track.prometheus_host": elsewhere("trackers/test_prometheus.py::"),
    "track.run_id": see(tracked, "mine", **WANDB),
    "track.random_suffix": see(tracked, False, **WANDB),
    "track.always_use_train_step": see(tracked, True, track__with=["tensorboard"]),
    "track.custom_rollout_log_function_path": elsewhere(HOOKS),
    "track.custom_eval_rollout_log_function_path": elsewhere(HOOKS),
    "track.samples": see(ran, 1, **JSONL),
    "track.log_passrate": running(True),
    "track.log_multi_turn": running(True),
    "track.log_reward_category": running("kind"),
    "track.log_correct_samples": running(True),
    "track.log_memory": see(ran, True, **JSONL),
    "track.measure_peak": elsewhere("data/test_metrics_catalogue.py::"),
    "track.plot": running(True),
    "track.timeline": elsewhere("stages/test_timeline.py::test_a_run_without_a_timeline"),
    "track.timeline_requests": elsewhere("stages/test_timeline.py::"),
    "cluster.executor": elsewhere(ON_RAY),
    "cluster.ray_address": elsewhere(ON_RAY, "ray-address"),
    "cluster.actor_num_nodes": see(placed, 2, cluster__executor="ray", train__device="cuda"),
    "cluster.actor_num_gpus_per_node": see(placed, 2, train__device="cuda"),
    "cluster.rollout_num_gpus": see(placed, 4, **SGLANG, train__device="cuda"),
    "cluster.rollout_num_gpus_per_engine": see(placed, 2, **SGLANG, train__device="cuda"),
    "cluster.num_gpus_per_node": see(placed, 1, **SGLANG, train__device="cuda"),
    "cluster.offload_train": elsewhere("stages/test_run_stage.py::"),
    "cluster.colocate": see(placed, True, **SGLANG, train__device="cuda"),
    "launch.setup": see(launched, ["module load cuda"]),
    "launch.time_limit": see(launched, "01:00:00"),
    "launch.term_s": see(launched, 60),
    "launch.requeues": see(launched, 3),
    "launch.partition": see(launched, "gpu"),
    "launch.account": see(launched, "mine"),
    "launch.cpus_per_node": see(launched, 8),
    "launch.memory_gib_per_node": see(launched, 64),
    "launch.gpu_type": see(launched, "A100"),
    "launch.gpu_memory_gib": elsewhere("launchers/test_jobs.py::test_what_cannot_be_launched", "gpu_memory_gib"),
    "launch.options": see(launched, ["--exclusive"]),
    "launch.image": see(launched, "another"),
    "launch.namespace": see(launched, "another"),
    "launch.claim": see(launched, "another"),
    "launch.folder": see(launched, "/another"),
    "launch.env": see(launched, ["HF_TOKEN"]),
    "launch.env_from": see(launched, "another", launch__env=["HF_TOKEN"]),
    "launch.pod": see(launched, {"hostNetwork": True}),
}  # fmt: skip

DATASET_ROWS: dict[str, Row] = {
    "path": evaluating(dataset(path="{folder}/other.jsonl")),
    "n_samples_per_prompt": evaluating(dataset(n_samples_per_prompt=2)),
    "temperature": evaluating(dataset(temperature=0.1), eval__max_response_len=20),
    "top_p": evaluating(dataset(top_p=0.1), eval__max_response_len=20),
    "top_k": evaluating(dataset(top_k=1), eval__max_response_len=20),
    "repetition_penalty": evaluating(dataset(repetition_penalty=2.0), eval__max_response_len=20),
    "presence_penalty": evaluating(dataset(presence_penalty=-2.0), eval__max_response_len=20),
    "frequency_penalty": evaluating(dataset(frequency_penalty=-2.0), eval__max_response_len=20),
    "max_response_len": evaluating(dataset(max_response_len=2)),
    "min_new_tokens": evaluating(dataset(min_new_tokens=6), rollout__stop_token_ids=list(range(128))),
    "stop": evaluating(dataset(stop=[chr(letter) for letter in range(32, 127)])),
    "stop_token_ids": evaluating(dataset(stop_token_ids=list(range(128)))),
    "input_key": asking(dataset(input_key="label")),
    "label_key": asking(dataset(label_key="kind")),
    "tool_key": asking(dataset(tool_key="instruments")),
    "metadata_key": asking(dataset(metadata_key="facts")),
    "custom_generate_function_path": evaluating(dataset(custom_generate_function_path="{folder}/own.py:generate")),
    "rm_type": evaluating(dataset(rm_type="exact")),
    "custom_rm_path": evaluating(dataset(custom_rm_path="{folder}/own.py:always")),
    "reward_key": evaluating(dataset(reward_key="low"), score__custom_rm_path="{folder}/own.py:two",
                             score__reward_key="high"),
    "success_threshold": evaluating(dataset(success_threshold=-1.0)),
}  # fmt: skip
"""Of every key of [eval.data.NAME]."""

TIS, RS = {"algorithm__use_tis": True}, {"algorithm__use_rs": True}
KL, SHARED = {"algorithm__kl_loss_coef": 0.1}, {"algorithm__critic": "shared"}
PER_ROLLOUT = {"algorithm__calculate_per_token_loss": False}

ALGORITHM_ROWS: dict[str, Row] = {
    "drop_zero_std_groups": training("other"),
    "calculate_per_token_loss": training("other", algorithm__fixed_length=None, train__num_steps_per_rollout=1),
    "fixed_length": training(7, **PER_ROLLOUT),
    "reward_clip": training(0.1),
    "norm_mean_type": training("batch"),
    "norm_std_type": training("running"),
    "normalize_advantages": training("other"),
    "advantage_clip": training(0.1),
    "max_len_mask": training(True),
    "difficulty_mask": training(True),
    "difficulty_low_threshold": training(0.45, algorithm__difficulty_mask=True),
    "difficulty_high_threshold": training(0.6, algorithm__difficulty_mask=True),
    "error_max_len_threshold": training(5),
    "kl_coef": training(0.1),
    "kl_loss_coef": training(0.1),
    "kl_loss_type": training("k1", **KL),
    "use_unbiased_kl": training(True, **KL),
    "ref_load": see(referred, "{folder}/other", **KL),
    "ref_update_interval": elsewhere("stages/test_learners.py::"),
    "opd_kl_coef": training(0.5),
    "opd_divergence": elsewhere("stages/test_distilled_runs.py::"),
    "opd_jsd_beta": elsewhere("stages/test_distilled_runs.py::"),
    "opd_top_k": elsewhere("stages/test_distilled_runs.py::"),
    "opd_teacher_load": see(
        distilled, "{folder}/other", algorithm__opd_kl_coef=0.5, algorithm__opd_teacher_load="{model}"
    ),
    "opd_teacher_url": elsewhere("contracts/test_teacher_contract.py::"),
    "opd_teacher_api": elsewhere("contracts/test_teacher_contract.py::"),
    **dict.fromkeys(
        ("opd_teachers", "opd_self_teacher", "opd_teacher_template", "opd_align"),
        elsewhere("stages/test_teachers.py::"),
    ),
    "opd_self_success": elsewhere("algorithms/test_privileged_prompts.py::", "success"),
    "entropy_coef": training(0.1),
    "report_entropy": training(False),
    "use_rollout_logprobs": training(True),
    "use_tis": training(True),
    "tis_clip": training(0.5, **TIS),
    "tis_clip_low": training(0.9, **TIS),
    "tis_level": training("sequence", **TIS),
    "tis_mode": training("mask", **TIS),
    "tis_veto": training(0.9, **TIS),
    "tis_batch_normalize": training(True, **TIS),
    "use_rs": training(True),
    "rs_level": training("token", **RS),
    "rs_clip": training(0.6, **RS, algorithm__rs_level="token"),
    "rs_clip_low": training(0.01, **RS, algorithm__rs_level="token"),
    "use_opsm": training(True),
    "opsm_delta": training(10.0, algorithm__use_opsm=True),
    "eps_clip": training(0.05),
    "eps_clip_high": training(0.02),
    "eps_clip_c": training(1.01, algorithm__use_rollout_logprobs=True),
    "gdpo_weights": training({"other": 1.0}),
    "grpo_std_normalization": training("other"),
    "topr_level": training("token"),
    "topr_clip": training(0.5),
    "topr_positive_weight": training(0.5),
    "topr_negative_weight": training(0.5),
    "tau_pos": training(3.0),
    "tau_neg": training(3.0),
    "gamma": training(0.5),
    "lambd": training(0.1),
    "turn_gamma": training(0.5),
    "outcome_weight": training(1.0),
    "turn_baseline": training("group"),
    "step_reward_weight": training(0.5),
    "episode_reward_weight": training(0.5),
    "value_clip": training(0.001, algorithm__critic_lr=0.1),
    "critic": training("shared"),
    "value_coef": training(0.9, **SHARED),
    "critic_load": training("{folder}/other"),
    "critic_lr": training(0.1),
    "num_critic_only_steps": training(1),
    "pairs": training("all"),
    "beta": training(0.5),
    "label_smoothing": training(0.2),
}
"""Of every key of [algorithm], tried with each algorithm that has it; "other" is a switch the other way."""
