"""Which tests are slow, and which start processes, Ray, SGLang or vLLM: by path, by fixture and by parameter."""

from __future__ import annotations

import pytest

SLOW, PROCESSES, RAY, SGLANG, VLLM = "slow", "processes", "ray", "sglang", "vllm"

HOSTILE_METADATA = (
    "tests/checkpoints/test_hostile_torch_dist.py::test_metadata_that_would_run_a_command_is_refused_in_a_line"
)

BY_PATH: dict[str, tuple[str, ...]] = {
    "tests/checkpoints/test_convert.py": (PROCESSES,),
    "tests/api/test_notebook.py": (PROCESSES, SLOW),
    "tests/api/test_python_examples.py": (SLOW,),
    "tests/checkpoints/test_convert.py::test_full_disk": (SLOW,),
    "tests/checkpoints/test_convert.py::test_killed_conversion": (SLOW,),
    "tests/checkpoints/test_hostile_torch_dist.py": (PROCESSES,),
    f"{HOSTILE_METADATA}[10**6": (SLOW,),
    f"{HOSTILE_METADATA}[a tuple": (SLOW,),
    "tests/checkpoints/test_megatron_files.py": (PROCESSES, SLOW),
    "tests/cli/": (PROCESSES,),
    "tests/cli/test_bad_input.py::test_a_full_disk": (SLOW,),
    "tests/cli/test_completion.py::test_zsh": (SLOW,),
    "tests/cli/test_convert_command.py": (SLOW,),
    "tests/cli/test_pipes.py": (SLOW,),
    "tests/cli/test_score_command.py::test_a_reward_that_hangs": (SLOW,),
    "tests/cli/test_serve_command.py": (SLOW,),
    "tests/contracts/test_executor_contract.py": (PROCESSES,),
    "tests/contracts/test_sync_contract.py": (PROCESSES, SLOW),
    "tests/contracts/test_tracker_contract.py::test_a_killed_run": (PROCESSES, SLOW),
    "tests/engines/server/test_serve_limits.py": (PROCESSES, SLOW),
    "tests/engines/sglang/test_hidden_keys.py": (PROCESSES,),
    "tests/engines/sglang/test_sglang_args.py": (PROCESSES, SGLANG, SLOW),
    "tests/engines/sglang/test_sglang_groups.py::test_a_machine_of_an_engine": (PROCESSES, SGLANG, SLOW),
    "tests/engines/sglang/test_sglang_nodes.py": (PROCESSES, SGLANG, SLOW),
    "tests/engines/sglang/test_sglang_disaggregation.py": (PROCESSES, SGLANG, SLOW),
    "tests/engines/sglang/test_sglang_client.py::test_another_model": (SLOW,),
    "tests/engines/sglang/test_sglang_groups.py::test_a_role_becomes_flags": (PROCESSES, SGLANG, SLOW),
    "tests/engines/supervisor/": (PROCESSES,),
    "tests/environments/": (PROCESSES,),
    "tests/environments/test_ecosystems.py": (PROCESSES, SLOW),
    "tests/environments/test_environment_runs.py": (PROCESSES, SLOW),
    "tests/engines/sglang/test_sglang_rollout.py": (PROCESSES, SGLANG, SLOW),
    "tests/engines/sglang/test_sglang_router.py": (PROCESSES, SGLANG, SLOW),
    "tests/engines/test_fleet.py": (PROCESSES, SLOW),
    "tests/viewer/test_page.py": (PROCESSES, SLOW),
    "tests/engines/vllm/": (PROCESSES,),
    "tests/executors/": (PROCESSES,),
    "tests/executors/test_ray": (RAY, SLOW),
    "tests/hooks/": (PROCESSES,),
    "tests/hooks/test_hooks_on_ray.py::test_hooks_act": (RAY, SLOW),
    "tests/hooks/test_kept_promises.py": (SLOW,),
    "tests/policies/megatron/test_model_layouts.py": (PROCESSES, SLOW),
    "tests/policies/megatron/test_megatron_torch_dist.py": (SLOW,),
    "tests/policies/megatron/test_shims.py::test_importing": (PROCESSES, SLOW),
    "tests/policies/test_fsdp_critic.py::test_two_ranks": (PROCESSES, SLOW),
    "tests/policies/test_fsdp_shared.py::test_two_ranks": (PROCESSES, SLOW),
    "tests/policies/test_group.py": (PROCESSES, SLOW),
    "tests/policies/test_lora.py::test_two_ranks": (PROCESSES, SLOW),
    "tests/recipes/test_agents.py": (PROCESSES,),
    "tests/rewards/": (PROCESSES,),
    "tests/registry/test_third_party.py::test_a_run": (PROCESSES, SLOW),
    "tests/registry/test_third_party.py::test_samples": (PROCESSES, SLOW),
    "tests/rewards/test_hostile.py::test_no_hostile_response": (SLOW,),
    "tests/rewards/test_judge.py::test_slimectl_serve": (SLOW,),
    "tests/rewards/test_reward_model.py::test_a_worker_process": (SLOW,),
    "tests/sandbox/": (PROCESSES,),
    "tests/settings/test_effects.py::test_a_setting": (SLOW,),
    "tests/sandbox/test_judging.py::test_no_program": (SLOW,),
    "tests/sandbox/test_without_namespaces.py::test_processes_are_bounded": (SLOW,),
    "tests/stages/": (PROCESSES,),
    "tests/stages/test_equalities.py": (SLOW,),
    "tests/stages/test_faults.py": (SLOW,),
    "tests/stages/test_faults.py::test_a_lost_machine": (RAY,),
    "tests/stages/test_finite.py::test_a_run_stops": (SLOW,),
    "tests/stages/test_grader.py::test_a_group_that_hangs": (SLOW,),
    "tests/stages/test_large_input.py": (SLOW,),
    "tests/stages/test_learners.py": (SLOW,),
    "tests/stages/test_resume.py": (SLOW,),
    "tests/stages/test_run_secrets.py": (SLOW,),
    "tests/stages/test_score.py::test_an_overrun_time_limit": (SLOW,),
    "tests/stages/test_score.py::test_rewards_stay": (SLOW,),
    "tests/stages/test_servers.py": (SLOW,),
    "tests/stages/test_servers.py::test_local_equals_ray": (RAY,),
    "tests/stages/test_servers.py::test_a_rollout_with_one_engine_on_ray": (RAY,),
    "tests/stages/test_servers.py::test_three_rounds_on_ray": (RAY, SGLANG),
    "tests/stages/test_servers.py::test_three_rounds_with_the_real_vllm": (VLLM,),
    "tests/test_floors.py": (PROCESSES,),
    "tests/test_gpu_benchmark.py::test_every_cell": (PROCESSES, SLOW),
    "tests/test_house.py": (PROCESSES,),
    "tests/test_house.py::test_mypy": (SLOW,),
    "tests/test_manifest.py": (PROCESSES,),
    "tests/test_site.py": (PROCESSES, SLOW),
    "tests/test_stdio.py": (PROCESSES,),
    "tests/trackers/test_services.py::test_a_killed_run": (PROCESSES, SLOW),
    "tests/trackers/test_shared_run.py::test_ranks": (PROCESSES, SLOW),
    "tests/weight_sync/test_push_path.py::test_a_push_of_an_adapter": (PROCESSES,),
    "tests/weight_sync/test_push_path.py::test_a_push_to_servers": (PROCESSES,),
}
"""By the beginning of a test's id."""

SECONDS = (
    "tests/agents/test_agent_runs.py",
    "tests/algorithms/test_against_plain.py::test_the_policy_loss_and_its_gradient",
    "tests/cli/test_ask_command.py::test_a_question_on_a_pipe",
    "tests/cli/test_bench_command.py::test_a_target_that_is_not_reached",
    "tests/cli/test_doctor_command.py::test_a_disagreement",
    "tests/cli/test_options.py::test_a_resume",
    "tests/cli/test_options.py::test_the_settings_file_of_this_folder",
    "tests/cli/test_progress.py::test_a_run_on_a_narrow_terminal",
    "tests/cli/test_progress.py::test_a_terminal_gets_a_bar",
    "tests/cli/test_progress.py::test_no_bar",
    "tests/cli/test_progress.py::test_no_control_characters",
    "tests/cli/test_rollout_command.py::test_a_file_of_other_inputs",
    "tests/cli/test_rollout_command.py::test_the_folder_of_a_run_as_a_model",
    "tests/cli/test_train_command.py::test_a_killed_training",
    "tests/contracts/test_executor_contract.py::test_an_item_that_overran",
    "tests/contracts/test_executor_contract.py::test_an_overrun_limit",
    "tests/contracts/test_executor_contract.py::test_neither_waiting_for_a_core",
    "tests/contracts/test_tracker_contract.py::test_every_number_is_found_under_its_name_and_step[mlflow]",
    "tests/data/test_metrics_catalogue.py::test_every_metric_that_a_run_writes",
    "tests/engines/server/test_serve_access.py::test_a_client_of_ours_waits",
    "tests/engines/server/test_serve_hostile.py::test_health_is_told",
    "tests/engines/sglang/test_sglang_client.py::test_an_address_where_nobody_answers",
    "tests/engines/supervisor/test_server_process.py::test_a_server_that_never_answers",
    "tests/engines/supervisor/test_server_process.py::test_servers_started_from_a_thread",
    "tests/environments/test_documented_commands.py::test_the_commands_are_complete",
    "tests/environments/test_episodes.py::test_a_host_ends_with_its_process",
    "tests/environments/test_episodes.py::test_an_episode_that_its_environment_breaks_off",
    "tests/executors/test_local.py::test_an_overrun_limit",
    "tests/policies/megatron/test_checkpoint_names.py::test_mcore_saves_and_loads",
    "tests/policies/test_vision.py::test_two_ranks_equal_one",
    "tests/recipes/test_agents.py::test_agents_train_in_a_run",
    "tests/rewards/test_hostile.py::test_no_text_at_all_raises[reasoning_gym]",
    "tests/rewards/test_instructions.py::test_no_hostile_response_raises",
    "tests/rewards/test_reasoning_gym.py::test_no_number_that_is_none",
    "tests/sandbox/test_isolation.py::test_a_fork_bomb",
    "tests/sandbox/test_isolation.py::test_nobody_outlives_the_limit",
    "tests/sandbox/test_isolation.py::test_one_hanging_test",
    "tests/sandbox/test_isolation.py::test_time_is_that_of_the_processor",
    "tests/simulation/test_simulation.py::test_a_plan_of_fsdp",
    "tests/simulation/test_simulation.py::test_a_step_waits",
    "tests/simulation/test_simulation.py::test_megatrons_ranks_agree",
    "tests/stages/test_check_reward.py::test_a_slow_sample_and_one_that_hangs",
    "tests/stages/test_grader.py::test_async_functions_wait_side_by_side",
    "tests/stages/test_hooks_in_stages.py::test_a_failing_attempt",
    "tests/stages/test_leftovers.py::test_a_resumed_run",
    "tests/stages/test_rollout_routing.py::test_experts_travel_through_files",
    "tests/stages/test_run_folder.py",
    "tests/stages/test_signal.py::test_a_run_stops",
    "tests/stages/test_signal.py::test_a_training_that_learns_nothing",
    "tests/stages/test_signals.py",
    "tests/stages/test_temperature.py::test_rollout_score_and_train_agree",
    "tests/stages/test_tool_time.py",
    "tests/stages/test_vision_runs.py",
    "tests/test_logging.py::test_the_library_prints_nothing",
    "tests/test_manifest.py",
    "tests/trackers/test_prometheus.py::test_the_endpoint_is_not_reached",
    "tests/trackers/test_resumed_curves.py",
    "tests/trackers/test_shared_run.py::test_a_shared_run_offline",
)
"""Beginnings of the ids of further tests that take more than a second when the machine is quiet."""

BY_FIXTURE: dict[tuple[str, str], tuple[str, ...]] = {
    ("tests/", "smollm2"): (SLOW,),
    ("tests/", "workshop"): (PROCESSES,),
    ("tests/contracts/", "served"): (PROCESSES, SLOW),
    ("tests/contracts/", "sglang"): (PROCESSES, SGLANG, SLOW),
    ("tests/contracts/", "vllm"): (PROCESSES, SLOW, VLLM),
    ("tests/contracts/test_executor_contract.py", "two"): (SLOW,),
    ("tests/policies/megatron/", "two"): (PROCESSES, SLOW),
    ("tests/policies/megatron/", "four"): (PROCESSES, SLOW),
}
"""By the beginning of a test's id, and a fixture that it uses."""

BY_PARAMETER: dict[tuple[str, str], tuple[str, ...]] = {
    ("cut", "four"): (PROCESSES, SLOW),
    ("cut", "two"): (PROCESSES, SLOW),
    ("dealt", "four"): (PROCESSES, SLOW),
    ("dealt", "two"): (PROCESSES, SLOW),
    ("engine", "served"): (PROCESSES, SLOW),
    ("engine", "sglang"): (PROCESSES, SGLANG, SLOW),
    ("engine", "vllm"): (PROCESSES, SLOW, VLLM),
    ("executor", "ray"): (PROCESSES, RAY, SLOW),
    ("made", "group"): (PROCESSES, SLOW),
    ("url", "served"): (PROCESSES, SLOW),
    ("url", "sglang"): (PROCESSES, SGLANG, SLOW),
    ("url", "vllm"): (PROCESSES, SLOW, VLLM),
}
"""By a fixture and its parameter, or the first value of its parameter."""


def mark(item: pytest.Item) -> None:
    """Add to a test what the tables say of it."""
    names: set[str] = set()
    for beginning, markers in BY_PATH.items():
        if item.nodeid.startswith(beginning):
            names.update(markers)
    if item.nodeid.startswith(SECONDS):
        names.add(SLOW)
    for (beginning, fixture), markers in BY_FIXTURE.items():
        if item.nodeid.startswith(beginning) and fixture in getattr(item, "fixturenames", ()):
            names.update(markers)
    callspec = getattr(item, "callspec", None)
    for fixture, value in callspec.params.items() if callspec is not None else ():
        value = value[0] if isinstance(value, tuple) and value else value
        if isinstance(value, str):
            names.update(BY_PARAMETER.get((fixture, value), ()))
    for name in sorted(names):
        item.add_marker(name)
