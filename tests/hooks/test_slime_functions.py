"""Functions written for slime (slime_functions.py) run as they stand, and change what they would change there."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workshop import set_up

from slimectl.data.records import sample_to_json
from slimectl.errors import HookError, SettingsError
from slimectl.hooks import HOOKS, FlatSettings
from slimectl.hooks.rollout import keep_group
from slimectl.migrate import slime_shapes as shapes
from slimectl.migrate.launch_scripts.reading import read
from slimectl.runtime.builders import hook_settings
from slimectl.runtime.run import TrainingRun
from slimectl.settings import Settings
from slimectl.settings.layers import from_assignments, from_custom_config, from_file
from slimectl.settings.loading import resolve
from slimectl.types import Sample, SamplingParams

FILES = ("slime_functions.py", "slime_examples.py", "slime_tools.py")
SMALL = (
    "run.rollout_batch_size=2", "rollout.n_samples_per_prompt=4", "rollout.max_response_len=6",
    "eval.before_train=false", "eval.interval=1", "track.with=['jsonl']", "rollout.data=[]",
)  # fmt: skip
SAMPLING = {
    "rollout.data_source_path": "CountingSource",
    "rollout.sample_hook_path": "mark",
    "rollout.dynamic_sampling_filter_path": "check_spread",
    "rollout.buffer_filter_path": "pop_newest",
    "rollout.sample_filter_path": "remove_truncated",
    "rollout.all_samples_process_path": "process_all",
    "rollout.data_postprocess_path": "hide_first_token",
    "score.custom_rm_path": "reward_func",
    "score.custom_reward_post_process_path": "post_process_rewards",
    "train.custom_advantage_function_path": "group_advantages",
    "train.custom_tis_function_path": "truncated_weights",
    "train.custom_pg_loss_reducer_function_path": "get_pg_loss_reducer",
    "track.custom_rollout_log_function_path": "log_rollout_data",
    "track.custom_eval_rollout_log_function_path": "log_eval_rollout_data",
}
WHOLE_ROUNDS = {
    "rollout.function_path": "generate_rollout",
    "score.custom_rm_path": "batched_reward_func",
    "train.custom_convert_samples_to_train_data_path": "convert_samples_to_train_data",
    "train.custom_loss_function_path": "reinforce_loss",
    "megatron.custom_init_path": "megatron_init",
    "megatron.custom_before_log_prob_hook_path": "before_log_prob",
    "megatron.custom_before_train_step_hook_path": "before_train_step",
}
OTHERS = {
    "rollout.custom_generate_function_path": "tests/engines/server/test_serve_generate.py",
    "sync.custom_post_write_path": "tests/contracts/test_sync_contract.py",
    "megatron.custom_model_provider_path": "tests/policies/megatron/test_own_model.py",
}
"""Hooks that are tried elsewhere: with a server, and a provider, against the built-in model."""


class Ran:
    """A run with such functions, and what it left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def samples(self, number: int) -> list[dict[str, Any]]:
        return self.lines(f"runs/a/step_{number:06d}/samples.jsonl")

    def notes(self, name: str) -> list[dict[str, Any]]:
        return [{key: value for key, value in line.items() if key != "name"}
                for line in self.lines("notes.jsonl") if line["name"] == name]  # fmt: skip

    @property
    def steps(self) -> list[dict[str, float]]:
        return [line["metrics"] for line in self.lines("runs/a/metrics.jsonl") if "train/step" in line["metrics"]]


def ran(folder: Path, model: Path, functions: dict[str, str], *assignments: str) -> Ran:
    """Run two rounds with these functions, which are modules of the current folder."""
    set_up(folder, model)
    for name in FILES:
        shutil.copy(Path(__file__).with_name(name), folder)
    (folder / "own.yaml").write_text("bonus: 0.5\nmax_turns: 2\ncap_path: slime_examples.cap_of_step\n")
    hooks = [f"{setting}={name if '.' in name else f'slime_functions.{name}'}" for setting, name in functions.items()]
    layers = [from_file(Path("slimectl.toml")), from_custom_config(Path("own.yaml"))]
    settings = resolve([*layers, from_assignments([*SMALL, *hooks, *assignments])]).settings
    assert TrainingRun(settings).execute()
    return Ran(folder)


def forget(patch: pytest.MonkeyPatch, *prefixes: str) -> None:
    """Import these modules anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] in prefixes]:
        patch.delitem(sys.modules, name)


@pytest.fixture(scope="module", params=["alone", "beside an installed slime"])
def situation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The functions are imported anew: without a slime, and beside a package of that name, of which nothing runs."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "alone":
            folder = tmp_path_factory.mktemp("installed")
            for module in ("slime", "slime/utils", "slime/rollout", "slime/rollout/rm_hub", "slime/ray"):
                (folder / module).mkdir()
                (folder / module / "__init__.py").write_text("raise AssertionError('a real slime is imported')")
            (folder / "slime/utils/types.py").write_text("raise AssertionError('a real slime is imported')")
            patch.syspath_prepend(folder)
        forget(patch, "slime", "slime_functions", "slime_examples")
        yield
        forget(patch, "slime", "slime_functions", "slime_examples")


@pytest.fixture(scope="module")
def of_parts(
    situation: None, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ran]:
    """Two rounds of slimectl's own loop with a function at every place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("parts"))
        yield ran(folder, model_dir("llama"), SAMPLING, "run.num_rollout=2", "score.reward_key=score",
                  "rollout.over_sampling_batch_size=3")  # fmt: skip


def test_the_source_gives_prompts_with_labels_that_are_lists_and_attributes_of_its_own(of_parts: Ran) -> None:
    first = of_parts.samples(1)
    assert [sample["prompt"] for sample in first] == ["count 2"] * 4 + ["count 3"] * 4
    assert [sample["label"] for sample in first[::4]] == [["2", "x"], ["3", "x"]]
    assert [sample["difficulty"] for sample in first[::4]] == [0, 1]
    assert json.loads((of_parts.folder / "runs/a/source-2.json").read_text()) >= 4


def test_the_reward_is_a_dict_whose_score_counts_and_reads_settings_of_its_own(of_parts: Ran) -> None:
    for sample in of_parts.samples(1):
        bonus = 0.5 * any(word in sample["response"] for word in sample["label"])
        assert sample["reward"]["score"] == pytest.approx(sample["reward"]["share"] + bonus)


def test_filters_and_hooks_of_samples_act(of_parts: Ran) -> None:
    assert of_parts.steps[0]["rollout/dynamic_filter/drop_spread_0"] == 1
    samples = of_parts.samples(1)
    assert [sample["round_number"] for sample in samples] == [1] * 8
    truncated = [sample["index"] for sample in samples if sample["status"] == "truncated"]
    assert [sample["index"] for sample in samples if sample.get("remove_sample")] == [
        index for index in truncated if index % 4 == 0
    ]
    assert {line["size"] for line in of_parts.notes("process_all")} == {100}
    assert {0, 1, 2} <= set(of_parts.notes("process_all")[0]["groups"])
    assert [line["rollout_id"] for line in of_parts.notes("pop_newest")] == [1, 2]


def test_the_groups_of_a_round_lose_the_tokens_that_are_hidden(of_parts: Ran) -> None:
    step, samples = of_parts.steps[0], of_parts.samples(1)
    raw = [sample["reward"]["score"] for sample in samples]
    assert step["rollout/raw_reward"] == pytest.approx(sum(raw) / len(raw))
    centred = [reward - sum(raw) / len(raw) for reward in raw]
    # A tenth of each token that is left, over the 8 rollouts of the step.
    expected = -sum(
        advantage * (sample["response_length"] - 1) / 10 / 8
        for advantage, sample in zip(centred, samples, strict=True)
        if not sample.get("remove_sample")
    )
    assert step["train/pg_loss"] == pytest.approx(expected, rel=1e-3)
    assert step["train/own_weight"] == pytest.approx(1.0, abs=1e-3)


def test_the_logs_see_rounds_and_evaluations(of_parts: Ran) -> None:
    assert of_parts.notes("log_rollout_data") == [
        {"rollout_id": number, "samples": 8, "wandb": False} for number in (1, 2)
    ]
    assert [line["rewards"] for line in of_parts.notes("log_eval_rollout_data")] == [3, 3]
    tracked = {name for line in of_parts.lines("runs/a/tracked.jsonl") for name in line["metrics"]}
    assert "rollout/own" in tracked
    assert not {name for name in tracked if name.startswith("eval/")}


def test_whole_rounds_a_loss_and_megatron_hooks(
    situation: None, model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ran(tmp_path, model_dir("llama"), WHOLE_ROUNDS, "run.num_rollout=1", "train.backend=megatron",
               "rollout.data=prompts.jsonl", "score.group_rm=true", "train.num_steps_per_rollout=2")  # fmt: skip
    step = done.steps[0]
    assert step["rollout/own_metric"] == 1
    assert step["train/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert step["train/grad_norm"] > 0
    assert [sample["reward"] for sample in done.samples(1)] == [0, 1] * 4
    evaluation = next(
        line["metrics"] for line in done.lines("runs/a/metrics.jsonl") if "eval/small_accuracy" in line["metrics"]
    )
    assert evaluation["eval/small_accuracy"] == 0.5  # of the samples 0 and 1
    assert done.notes("megatron_init") == [{"checkpoint": True, "tensor": 1}]
    assert done.notes("before_log_prob") == [{"prefix": "", "chunks": 1}]
    assert done.notes("before_train_step") == [{"rollout_id": 1, "step_id": i, "call": i} for i in (0, 1)]


EXAMPLE_PARTS = {
    "rollout.data_source_path": "slime_examples.AlternatingSource",
    "rollout.custom_generate_function_path": "slime_examples.generate_with_fan_out",
    "rollout.dynamic_sampling_filter_path": "slime_examples.check_reward_cap",
    "score.custom_rm_path": "slime_examples.dapo_reward",
    "train.custom_tis_function_path": "slime_examples.weights_with_cp",
    "track.custom_rollout_log_function_path": "slime_examples.log_by_source",
}


def test_parts_in_the_manner_of_slimes_examples(
    situation: None, model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ran(tmp_path, model_dir("llama"), EXAMPLE_PARTS, "run.num_rollout=1", "score.reward_key=score",
               "rollout.data=['prompts.jsonl@[0:2]','prompts.jsonl@[2:4]']", "rollout.shuffle=false",
               "rollout.n_samples_per_prompt=2", "eval.interval=none")  # fmt: skip
    samples = done.samples(1)
    assert [sample["prompt"] for sample in samples] == ["say one"] * 3 + ["say three"] * 3
    assert [sample["metadata"]["data_source"] for sample in samples] == ["source_0"] * 3 + ["source_1"] * 3
    assert [sample["reward"]["score"] for sample in samples] == [-1, 1, 1, -1, 1, 1]  # below the cap of 0.5
    assert [sample["rollout_id"] for sample in samples] == [0, 1, 1, 2, 3, 3]
    tracked = {name: value for line in done.lines("runs/a/tracked.jsonl") for name, value in line["metrics"].items()}
    lengths = [sample["response_length"] for sample in samples]
    assert tracked["rollout/source_0/length/max"] == max(lengths[:3])
    assert tracked["rollout/source_1/length/mean"] == pytest.approx(sum(lengths[3:]) / 3)
    assert tracked["perf/longest_sample_tokens_per_sec"] > 0
    assert done.steps[0]["train/example_weight"] == pytest.approx(1.0, abs=1e-3)
    state = json.loads((tmp_path / "runs/a/rollout/global_dataset_state_dict_1_1.json").read_text())
    assert (state["sample_offset"], state["sample_group_index"], state["buffer"]) == (1, 1, [])


def test_whole_rounds_in_the_manner_of_slimes_examples(
    situation: None, model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    functions = {
        "rollout.function_path": "slime_examples.wrapped_rollout",
        "rollout.custom_generate_function_path": "slime_examples.generate_by_turns",
    }
    done = ran(tmp_path, model_dir("llama"), functions, "run.num_rollout=1", "rollout.data=prompts.jsonl")
    samples = done.samples(1)
    assert [sample.get("remove_sample", False) for sample in samples] == ([True] + [False] * 3) * 2
    # Two tokens of the model, four bytes of the tool, two tokens of the model.
    assert [sample["loss_mask"] for sample in samples] == [[1, 1, 0, 0, 0, 0, 1, 1]] * 8
    assert {sample["calls"] for sample in samples} == {8}  # one counter for all
    assert all(" 42 " in sample["response"] for sample in samples)
    assert done.steps[0]["rollout/own"] == 7.0
    assert done.notes("evaluated") == [{"names": ["eval"], "samples": 3}]


def test_agents_in_a_thread_of_the_functions_own(
    situation: None, model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    functions = {
        "rollout.function_path": "slime_examples.threaded_rollout",
        "rollout.custom_generate_function_path": "slime_examples.generate_with_agents",
    }
    done = ran(tmp_path, model_dir("llama"), functions, "run.num_rollout=1", "rollout.data=prompts.jsonl",
               "score.rm_type=exact", "score.custom_rm_path=none", "eval.interval=none")  # fmt: skip
    samples = done.samples(1)
    assert [sample["rollout_id"] for sample in samples] == [index for index in range(8) for _ in range(2)]
    assert {sample["reward"] for sample in samples} == {0.5}  # an untrained model says no word of the labels


def test_an_agent_that_asks_an_adapter_by_http(
    situation: None, model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    functions = {"rollout.custom_generate_function_path": "slime_examples.generate_by_api"}
    done = ran(tmp_path, model_dir("llama"), functions, "run.num_rollout=1", "rollout.data=prompts.jsonl",
               "rollout.n_samples_per_prompt=2", "rollout.max_response_len=64", "score.custom_rm_path=none",
               "score.rm_type=none", "eval.interval=none", "algorithm.name=reinforce_plus_plus")  # fmt: skip
    samples = done.samples(1)
    assert {sample["reward"] for sample in samples} == {0.25}
    assert {sample["metadata"]["agent"]["turn_count"] for sample in samples} == {2}
    assert [sample["rollout_id"] for sample in samples] == [0, 1, 2, 3]
    assert {sum(sample["loss_mask"]) for sample in samples} <= {2, 3, 4, 5, 6}  # two turns of at most three tokens


def test_demonstrations_by_a_rollout_function(
    situation: None, model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ran(tmp_path, model_dir("llama"), {"rollout.function_path": "slime_examples.sft_rollout"},
               "run.num_rollout=1", "rollout.data=prompts.jsonl", "rollout.shuffle=false",
               "rollout.n_samples_per_prompt=1", "algorithm.name=reinforce_plus_plus",
               "eval.interval=none")  # fmt: skip
    assert [sample["label"] in sample["taught"][0] for sample in done.samples(1)] == [True, True]
    assert [sum(sample["loss_mask"]) - len(sample["label"]) for sample in done.samples(1)] == [1, 1]  # the end token


def test_every_hook_is_tried_with_a_function_of_slimes_style() -> None:
    assert {*SAMPLING, *WHOLE_ROUNDS, *OTHERS} == set(HOOKS)


NAMES = """
    actor_num_nodes actor_num_gpus_per_node advantage_estimator allgather_cp apply_chat_template
    apply_chat_template_kwargs async_buffer_size async_save balance_by_flops balance_data buffer_filter_path
    calculate_per_token_loss check_weight_update_equal ci_disable_kl_checker ci_load_grad_norm ci_save_grad_norm
    ci_test ci_train_rollout_logprob_abs_diff_threshold clip_grad colocate compute_advantages_and_returns
    custom_advantage_function_path custom_config_path custom_convert_samples_to_train_data_path
    custom_eval_rollout_log_function_path custom_generate_function_path custom_loss_function_path
    custom_megatron_before_log_prob_hook_path custom_megatron_before_train_step_hook_path custom_megatron_init_path
    custom_model_provider_path custom_pg_loss_reducer_function_path custom_reward_post_process_path custom_rm_path
    custom_rollout_log_function_path custom_tis_function_path custom_update_weight_post_write_path
    data_pad_size_multiplier data_source_path debug_rollout_only debug_train_only distributed_backend
    distributed_timeout_minutes dump_details dynamic_sampling_filter_path enable_mtp_training entropy_coef eps_clip
    eps_clip_c eps_clip_high eval_config eval_function_path eval_input_key eval_interval eval_label_key
    eval_max_context_len eval_max_prompt_len eval_max_response_len eval_min_new_tokens eval_prompt_data
    eval_reward_key eval_temperature eval_tool_key eval_top_k eval_top_p fetch_trajectory_retry_times freeze_indexer
    freeze_params_name_list fsdp_max_tokens_per_gpu gamma get_mismatch_metrics global_batch_size
    gradient_checkpointing group_rm grpo_std_normalization hf_checkpoint http_proxy input_key keep_old_actor kl_coef
    kl_loss_coef kl_loss_type label_key lambd load load_debug_rollout_data load_debug_rollout_data_subsample
    load_forge_rollout_data log_correct_samples log_model_config log_multi_turn log_passrate log_probs_chunk_size
    log_probs_max_tokens_per_gpu log_reward_category loss_mask_type loss_type lr lr_decay_iters lr_decay_style
    lr_warmup_iters mask_offpolicy_in_partial_rollout max_tokens_per_gpu megatron_config_path
    megatron_deepgemm_forward_layers megatron_deepgemm_forward_modules megatron_deepgemm_moe_forward_layers
    megatron_deepgemm_moe_forward_modules memory_recorder memory_snapshot_dir memory_snapshot_num_steps metadata_key
    micro_batch_size min_batch_collection_ratio min_lr model_name mtp_loss_scaling_factor mtp_num_layers
    multimodal_keys n_samples_per_eval_prompt n_samples_per_prompt no_save_optim normalize_advantages
    num_critic_only_steps num_epoch num_gpus_per_node num_rollout num_steps_per_rollout offload offload_rollout
    offload_train only_train_params_name_list opd_kl_coef opd_teacher_ckpt_step opd_teacher_load opd_type opsm_delta
    output_dir over_sampling_batch_size padded_vocab_size partial_rollout prefill_num_servers profile_target
    prompt_data qwen_gdn_backend recompute_loss_function record_memory_history ref_ckpt_step ref_load
    ref_update_interval release_train reset_optimizer_states reward_key rewards_normalization rm_type rm_url
    rollout_all_samples_process_path rollout_batch_size rollout_buffer_url rollout_data_postprocess_path
    rollout_data_transport rollout_external_engine_addrs rollout_function_path rollout_global_dataset
    rollout_health_check_first_wait rollout_health_check_interval rollout_health_check_timeout
    rollout_max_context_len rollout_max_prompt_len rollout_max_response_len rollout_num_gpus
    rollout_num_gpus_per_engine rollout_sample_filter_path rollout_sample_hook_path rollout_seed rollout_shuffle
    rollout_skip_special_tokens rollout_stop rollout_stop_token_ids rollout_task_type rollout_temperature
    rollout_top_k rollout_top_p save save_debug_rollout_data save_debug_train_data save_hf save_interval seed
    sglang_config sglang_router_balance_abs_threshold sglang_router_balance_rel_threshold sglang_router_ip
    sglang_router_port sglang_router_request_timeout_secs sglang_server_concurrency skip_eval_before_train
    start_rollout_id tb_experiment_name tb_project_name tis_clip tis_clip_low tis_threshold tool_key train_backend
    train_env_vars true_on_policy_mode update_weight_buffer_size update_weight_delta_checksum
    update_weight_delta_encoding update_weight_disk_dir update_weight_disk_keep_files
    update_weight_local_checkpoint_dir update_weight_mode update_weight_transport update_weights_interval use_critic
    use_distributed_post use_dynamic_batch_size use_fault_tolerance use_kl_loss use_opd use_opsm use_rollout_entropy
    use_rollout_logprobs use_rollout_routing_replay use_routing_replay use_stateless_adam use_tensorboard use_tis
    use_unbiased_kl use_wandb value_clip wandb_always_use_train_step wandb_dir wandb_group wandb_host wandb_key
    wandb_mode wandb_project wandb_random_suffix wandb_run_id wandb_team
"""
"""Arguments of slime's scripts."""


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "sft", "sapo"])
def test_args_has_every_argument_of_slime(algorithm: str) -> None:
    assignments = [f"algorithm.name={algorithm}", "engine.url=http://a.example:30001"]
    args = FlatSettings(resolve([from_assignments(assignments)]).settings)
    assert [name for name in NAMES.split() if not hasattr(args, name)] == []
    assert (args.sglang_router_ip, args.sglang_router_port) == ("a.example", 30001)
    assert (args.advantage_estimator, args.use_critic, args.seed) == (algorithm, algorithm == "ppo", 1234)


def test_args_reads_what_the_flags_of_a_launch_script_became(tmp_path: Path) -> None:
    flags = {
        "async_buffer_size": 2, "hf_checkpoint": "/m", "rollout_health_check_interval": 7.0, "rollout_temperature": 0.7,
        "seed": 11, "sglang_server_concurrency": 9, "sglang_dtype": "float32", "tis_threshold": 3.0,
        "use_fault_tolerance": True,
    }  # fmt: skip
    options = [f"--{name.replace('_', '-')} {value}" for name, value in flags.items()]
    script = tmp_path / "run.sh"
    script.write_text(" ".join(["python3 train.py", "--prompt-data /d.jsonl", "--use-tis", *options]), encoding="utf-8")
    args = FlatSettings(read(script, environ={}).conversion.settings)
    assert {name: getattr(args, name) for name in flags} == flags
    assert (args.use_tis, args.prompt_data, args.advantage_estimator) == (True, "/d.jsonl", "grpo")


def test_what_has_no_counterpart_reads_as_slimes_default_or_as_custom_says() -> None:
    backends = ["train.backend=megatron", "engine.backend=sglang", "sglang.args.mem_fraction_static=0.5"]
    values = from_assignments([*backends, "custom.max_turns=4", "megatron.args.qk_layernorm=true"])
    settings = resolve([values]).settings
    args = FlatSettings(settings)
    assert (args.ci_test, args.max_turns, args.qk_layernorm, args.sglang_mem_fraction_static) == (False, 4, True, 0.5)
    assert args.custom.max_turns == 4
    assert (args.eps_clip_high, args.over_sampling_batch_size, args.global_batch_size) == (0.2, 32, 256)  # derived
    with pytest.raises(AttributeError, match=r"Use args.SECTION.KEY, or set sglang.args.dp_siez"):
        _ = args.sglang_dp_siez
    unset = FlatSettings(resolve([]).settings)  # slime has no such argument: code asks for it with a default
    assert getattr(unset, "max_turns", 5) == 5
    with pytest.raises(AttributeError, match="max_trun is not a setting"):
        _ = args.max_trun
    with pytest.raises(HookError, match=r"has no address. Ask for the parameter `generate`"):
        _ = args.sglang_router_ip
    with pytest.raises(SettingsError, match=r"custom.lr: hooks read train.lr as args.lr"):
        resolve([from_assignments(["custom.lr=1"])])


def test_the_filter_that_scripts_of_slime_name_is_here() -> None:
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    settings = resolve([from_assignments([f"rollout.dynamic_sampling_filter_path={path}"])]).settings
    assert keep_group([Sample(reward=1.0), Sample(reward=0.0)], settings=settings) is True
    equal = [Sample(reward=1.0), Sample(reward=1.0)]
    assert keep_group(equal, settings=settings) == (False, "zero_std_1.0")
    fallback = resolve([from_assignments([f"rollout.dynamic_sampling_filter_path={path}_with_fallback"])]).settings
    assert keep_group(equal, settings=fallback) == (False, "zero_std_1.0", True)


def test_args_name_the_model_that_a_run_made_and_follow_servers_that_come_back() -> None:
    engine = SimpleNamespace(addresses=["http://127.0.0.1:1"])
    args = FlatSettings(hook_settings(Settings(), engine, Path("runs/a/model")))
    engine.addresses[:] = ["http://127.0.0.1:2"]
    assert (args.hf_checkpoint, args.sglang_router_port) == ("runs/a/model", 2)


class Foreign:
    """A sample of another package's class."""

    def __init__(self, **values: Any) -> None:
        vars(self).update({"tokens": [1, 2], "response_length": 1, "status": Sample.Status.COMPLETED, **values})


def test_results_count_by_their_attributes() -> None:
    groups, metrics = shapes.rollout_result(([Foreign(group_index=1, note="a"), Foreign(group_index=1)], {"x": 1}))
    assert [(sample.tokens, sample.group_index) for sample in groups[0]] == [([1, 2], 1)] * 2
    assert (groups[0][0].note, metrics) == ("a", {"x": 1})
    evaluated = {"small": {"rewards": [0.5], "samples": [Foreign(reward=None)]}}
    assert shapes.rollout_result(evaluated)[0][0][0].reward == 0.5


def test_a_key_of_sampling_params_that_no_engine_knows_is_refused() -> None:
    base = SamplingParams(max_tokens=9, seed=1)
    params = shapes.sampling_params({"max_new_tokens": 3, "stop": "x", "skip_special_tokens": False}, base)
    assert params == SamplingParams(max_tokens=3, seed=1, stop=("x",), skip_special_tokens=False)
    biased = SamplingParams(min_p=0.1, logit_bias=((3, -1.0),), stop=("a", "b"))
    assert shapes.sampling_params(shapes.SamplingDict.of(biased), base) == dataclasses.replace(biased, seed=1)
    assert shapes.SamplingDict.of(biased)["logit_bias"] == {"3": -1.0}
    plain = dataclasses.replace(shapes.SamplingDict.of(biased), min_p=0.0)
    assert shapes.sampling_params(plain, biased) == dataclasses.replace(biased, min_p=0.0)
    assert (shapes.SamplingDict.of(biased).stop, shapes.SamplingDict.of(base).min_p) == (("a", "b"), 0.0)
    with pytest.raises(ValueError, match=r"unknown key 'max_token'\. Known keys: temperature"):
        shapes.sampling_params({"max_token": 3}, base)


def test_free_attributes_of_a_sample_are_kept_and_fields_are_not_shadowed() -> None:
    sample = Sample(index=3, reward={"acc": 1.0}, response="x")
    sample.payload, sample.scores = "p", torch.tensor([0.5])
    again = Sample.from_dict(sample.to_dict())
    assert again.payload == "p"
    assert sample_to_json(sample)["scores"] == [0.5]
    assert (sample.get_reward_value(FlatSettings(Settings())), copy.deepcopy(sample).payload) == ({"acc": 1.0}, "p")
    assert sample.get_reward_value(FlatSettings(resolve([from_assignments(["score.reward_key=acc"])]).settings)) == 1.0
    with pytest.raises(AttributeError, match="no attribute 'payloda'"):
        _ = sample.payloda
    with pytest.raises(AttributeError):
        sample.prompt_length = 3
