"""Settings from many places become one set whose every value knows its origin."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from slimectl import recipes
from slimectl.errors import SettingsError
from slimectl.runtime import builders
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.keys import flat, settings_toml
from slimectl.settings.layers import Layer, from_assignments, from_environment, from_file, parse_value
from slimectl.settings.loading import resolve
from slimectl.stages.grader import worker_count


def settle(*assignments: str):
    return resolve([from_assignments(assignments)])


def test_later_layers_win_and_every_key_names_its_origin(tmp_path: Path):
    file = tmp_path / "a.toml"
    file.write_text("[train]\nlr = 1e-4\nclip_grad = 2.0\n[rollout]\ntemperature = 0.7\n")
    environment = from_environment({"SLIMECTL_TRAIN_LR": "2e-4", "SLIMECTL_ROLLOUT_TOP_P": "0.9", "HOME": "/"})
    found = resolve([from_file(file), environment, from_assignments(["train.lr=3e-4"])])
    assert found.settings.train.lr == 3e-4
    assert found.settings.train.clip_grad == 2.0
    assert found.settings.rollout.top_p == 0.9
    assert found.origins["train.lr"] == "command line"
    assert found.origins["rollout.top_p"] == "environment"
    assert found.origins["rollout.temperature"] == str(file)
    assert found.origins["train.weight_decay"] == "default"


def test_variables_of_a_kubernetes_service_named_slimectl_are_no_settings():
    # Kubernetes, "Discovering services": seven variables for each port, SVC_SERVICE_PORT_NAME for a named one.
    links = """
        SLIMECTL_SERVICE_HOST=10.43.1.39 SLIMECTL_SERVICE_PORT=8000 SLIMECTL_SERVICE_PORT_HTTP=8000
        SLIMECTL_PORT=tcp://10.43.1.39:8000 SLIMECTL_PORT_8000_TCP=tcp://10.43.1.39:8000
        SLIMECTL_PORT_8000_TCP_PROTO=tcp SLIMECTL_PORT_8000_TCP_PORT=8000 SLIMECTL_PORT_8000_TCP_ADDR=10.43.1.39
        SLIMECTL_PORT_53_UDP=udp://10.43.1.39:53 SLIMECTL_TRAIN_PORT=tcp://10.43.1.40:80 SLIMECTL_TRAIN_SERVICE_HOST=a
    """
    environment = dict(line.split("=", 1) for line in links.split())
    own = {"SLIMECTL_TRAIN_LR": "2e-4", "SLIMECTL_CUSTOM_SERVICE_HOST": "10.0.0.1"}
    values = {"train": {"lr": 2e-4}, "custom": {"service_host": "10.0.0.1"}}
    assert from_environment(environment | own).values == values


def test_an_unknown_variable_is_named():
    with pytest.raises(SettingsError) as refused:
        resolve([from_environment({"SLIMECTL_TRAIN_LRR": "1"})])
    unknown = "train.lrr: unknown setting (environment variable SLIMECTL_TRAIN_LRR). Did you mean train.lr?"
    assert str(refused.value) == unknown


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("algorithm.eps_clip_hihg=1", "algorithm.eps_clip_hihg: unknown setting (command line). Did you mean "
                                      "algorithm.eps_clip_high?"),
        ("trian.lr=1", "trian.lr: unknown setting (command line). Did you mean train.lr?"),
        ("train.lr=abc", "train.lr: input should be a valid number, unable to parse string as a number, not 'abc' "
                         "(command line)"),
        ("rollout.temperature=0", "rollout.temperature: input should be greater than 0, not 0 (command line)"),
        ("algorithm.name=ppx", "algorithm.name: unknown algorithm 'ppx'. Choose one of " + ", ".join(ALGORITHMS) + "."),
        ("run.profile=[3,2]", "run.profile: must be [first, last] with first <= last, not [3, 2] "
                              "(command line)"),
        ("lr=1", "-s lr=1: write it as section.key=value, e.g. -s train.lr=1"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_key_and_the_way_out(assignment: str, message: str):
    with pytest.raises(SettingsError) as refused:
        settle(assignment)
    assert str(refused.value) == message
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("assignments", "both"),
    [
        (["train.num_steps_per_rollout=7"], ["train.num_steps_per_rollout", "run.rollout_batch_size"]),
        (["train.num_steps_per_rollout=2", "train.global_batch_size=4"], ["train.global_batch_size"]),
        (["run.num_rollout=2", "run.num_epoch=2"], ["run.num_rollout", "run.num_epoch"]),
        (["run.num_rollout=2", "run.profile=[3,4]"], ["run.num_rollout is 2", "run.profile: round 3"]),
        (["algorithm.use_tis=true", "algorithm.use_rollout_logprobs=true"], ["use_tis", "use_rollout_logprobs"]),
        (["eval.interval=2"], ["eval.interval", "eval.data"]),
        (["megatron.tensor_model_parallel_size=2"], ["megatron.tensor_model_parallel_size", "train.backend"]),
        (
            ["train.backend=megatron", "megatron.context_parallel_size=2"],
            ["cluster.actor_num_gpus_per_node", "[megatron]"],
        ),
        (
            ["train.backend=megatron", "megatron.expert_model_parallel_size=4", "cluster.actor_num_gpus_per_node=2"],
            ["megatron.expert_model_parallel_size", "cluster"],
        ),
        (
            ["train.freeze_params_name_list=a", "train.only_train_params_name_list=b"],
            ["train.freeze_params_name_list", "train.only_train_params_name_list"],
        ),
        (["rollout.min_new_tokens=300"], ["rollout.min_new_tokens", "rollout.max_response_len"]),
        (["train.min_lr=1"], ["train.min_lr", "train.lr"]),
        (
            ["train.balance_by_flops=true", "train.use_dynamic_batch_size=false"],
            ["train.balance_by_flops", "train.use_dynamic_batch_size = true"],
        ),
        (
            ["train.balance_by_flops=true", "train.balance_data=false"],
            ["balance_by_flops", "train.balance_data = true"],
        ),
        (["train.micro_batch_size=2"], ["train.micro_batch_size", "train.use_dynamic_batch_size"]),
        (["train.lora_rank=4", "train.freeze_params_name_list=embed"], ["train.freeze_params_name_list", "lora_rank"]),
        (["train.lora_load=adapter"], ["train.lora_load has no effect without train.lora_rank"]),
        (
            ["train.recompute_modules=moe"],
            ["train.recompute_modules has no effect without train.recompute_granularity"],
        ),
        (
            ["train.recompute_granularity=selective", "train.gradient_checkpointing=true"],
            ["train.recompute_granularity has no effect with train.gradient_checkpointing"],
        ),
        (
            ["train.backend=megatron", "train.offload=parameters"],
            ["train.offload: parameters, but Megatron-core", 'Set "optimizer"'],
        ),
        (
            ["train.backend=megatron", "train.offload=optimizer", "train.optimizer_state_dtype=bfloat16"],
            ["train.optimizer_state_dtype: bfloat16 and train.offload cannot be combined"],
        ),
        (["cluster.offload_train=false"], ["cluster.offload_train has no effect without cluster.colocate"]),
        (["run.max_staleness=1"], ["run.max_staleness", "run.async_level"]),
        (["cluster.ray_address=a:1"], ["cluster.ray_address", "cluster.executor"]),
        (["cluster.actor_num_nodes=2"], ["cluster.actor_num_nodes", "cluster.executor"]),
        (
            ["engine.backend=sglang", "cluster.rollout_num_gpus=3", "cluster.rollout_num_gpus_per_engine=2"],
            ["cluster.rollout_num_gpus: 3", "cluster.rollout_num_gpus_per_engine: 2. Use 2"],
        ),
        (["cluster.rollout_num_gpus_per_engine=2"], ["cluster.rollout_num_gpus_per_engine", "engine.backend"]),
        (["engine.url=http://a:1", "engine.num_engines=2"], ["engine.url", "engine.num_engines"]),
        (["engine.num_engines=2", "sync.transport=in_process"], ["sync.transport", "tensor, distributed, disk"]),
        (["sync.transport=disk"], ["sync.transport", "engine.num_engines"]),
        (["cluster.colocate=true", "run.async_level=1"], ["cluster.colocate", "run.async_level"]),
        (["cluster.colocate=true", "engine.num_engines=2", "sync.transport=delta"], ["cluster.colocate", "delta"]),
        (["cluster.executor=ray", "rollout.data=-"], ["rollout.data", "actor"]),
        (
            ["engine.backend=sglang", "sglang.args={enable_deterministic_inference=true}", "rollout.min_p=0.1"],
            ["min_p", "sglang"],
        ),
    ],
)
def test_contradictions_between_sections_name_both_keys(assignments: list[str], both: list[str]):
    with pytest.raises(SettingsError) as refused:
        settle(*assignments)
    assert all(key in str(refused.value) for key in both)


def test_a_key_may_repeat_its_section_as_people_know_it():
    assert settle("rollout.rollout_temperature=0.5").settings.rollout.temperature == 0.5


def test_tables_merge_key_by_key_and_one_string_is_a_list():
    found = settle("eval.data.aime=a.jsonl", "eval.data.math=b.jsonl", "rollout.data=p.jsonl")
    assert found.settings.eval.data == {"aime": "a.jsonl", "math": "b.jsonl"}
    assert found.settings.rollout.data == ["p.jsonl"]


@pytest.mark.parametrize("value", ["", "none", "[]"])
def test_an_empty_value_or_none_empties_a_list(value: str):
    layers = [Layer("recipe", {"sft_warmup": {"data": ["words.jsonl"]}, "eval": {"data": {"a": "words.jsonl"}}})]
    settings = resolve([*layers, from_assignments([f"sft_warmup.data={value}", "eval.data=none"])]).settings
    assert (settings.sft_warmup.data, settings.eval.data) == ([], {})


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("true", True), ("none", None), ("[1, 2]", [1, 2]), ("a.jsonl", "a.jsonl")]
    + [(text, text) for text in ("2026-01-31", "00:20:00", "2026-01-31T10:00:00Z")],
)
def test_values_are_toml_where_they_can_be(text: str, value: object):
    assert parse_value(text) == value


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_dates_and_times_without_quotes_are_text(suffix: str, tmp_path: Path):
    file = tmp_path / f"s.{suffix}"
    toml = '[run]\nname = 2026-01-31\n[launch]\ntime_limit = 00:20:00\noptions = ["--begin=x", 10:00:00]\n'
    yaml = 'run:\n  name: 2026-01-31\nlaunch:\n  time_limit: "00:20:00"\n  options: ["--begin=x", "10:00:00"]\n'
    file.write_text(toml if suffix == "toml" else yaml)
    settings = resolve([from_file(file)]).settings
    assert (settings.run.name, settings.launch.time_limit) == ("2026-01-31", "00:20:00")
    assert settings.launch.options == ["--begin=x", "10:00:00"]


def test_a_file_that_is_missing_or_no_toml_or_has_no_sections_is_refused(tmp_path: Path):
    with pytest.raises(SettingsError, match="no such settings file"):
        from_file(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(SettingsError, match="not valid TOML"):
        from_file(tmp_path / "bad.toml")
    (tmp_path / "flat.toml").write_text("lr = 1\n")
    with pytest.raises(SettingsError, match=r"settings belong in sections"):
        from_file(tmp_path / "flat.toml")


def test_resolved_settings_written_down_resolve_to_themselves():
    first = settle(
        "train.lr=1e-5", "eval.data.aime=a.jsonl", "run.keep_checkpoints=none", "algorithm.eps_clip_high=0.28"
    )
    again = resolve([Layer("file", tomllib.loads(settings_toml(first.settings)))])
    assert dict(flat(again.settings)) == dict(flat(first.settings))


def test_every_setting_has_words():
    from slimectl.settings.reference import entries

    wordless = [entry.key for entry in entries() if not entry.text]
    assert wordless == []


@pytest.mark.parametrize(
    ("assignments", "workers"),
    [
        (["score.rm_type=exact"], False),
        (["score.rm_type=math"], True),
        (["score.rm_type=math", "score.workers=0"], False),
        (["score.custom_rm_path=length.py:reward"], False),
        ([], False),
    ],
)
def test_symbolic_verifiers_get_processes_that_a_time_limit_can_kill(
    assignments: list[str], workers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "length.py").write_text("def reward(sample):\n    return len(sample.response)\n")
    monkeypatch.chdir(tmp_path)
    settings = settle(*assignments).settings
    assert (worker_count(settings.score, builders.reward(settings)) > 0) == workers


REWARD_FILE = Layer("a.toml", {"score": {"custom_rm_path": "length.py:reward"}})


def test_of_two_rewards_the_later_layer_gives_the_one_that_counts():
    by_flag = resolve([REWARD_FILE, Layer("flag", {"score": {"rm_type": "exact"}})])
    assert (by_flag.settings.score.rm_type, by_flag.settings.score.custom_rm_path) == ("exact", None)
    assert by_flag.origins["score.custom_rm_path"] == "default, as flag sets score.rm_type"
    back = resolve([REWARD_FILE, Layer("environment", {"score": {"rm_type": "none"}})])  # sets none, so replaces none
    assert back.settings.score.custom_rm_path == "length.py:reward"
    summed = resolve([Layer("a", {"score": {"rm_type": "math"}}), from_assignments(['score.rm=[{type = "exact"}]'])])
    assert (summed.settings.score.rm_type, len(summed.settings.score.rm)) == (None, 1)


@pytest.mark.parametrize(
    "layers",
    [
        [from_assignments(["score.rm_type=math"]), Layer("flag", {"score": {"custom_rm_path": "a.py:f"}})],
        [Layer("a.toml", {"score": {"rm_type": "math", "custom_rm_path": "a.py:f"}})],
        [Layer("a.toml", {"eval": {"data": {"a": {"path": "a", "rm_type": "math", "custom_rm_path": "a.py:f"}}}})],
    ],
)
def test_two_rewards_in_one_place_are_refused_and_both_are_named(layers: list[Layer]):
    with pytest.raises(SettingsError, match=r"rm_type.*custom_rm_path|custom_rm_path.*rm_type"):
        resolve(layers)


def test_what_a_recipe_sets_for_one_algorithm_is_no_setting_of_another():
    recipe = recipes.find("quickstart", instead=False, needed=True).layer
    assert recipe is not None
    assert resolve([recipe]).settings.algorithm.drop_zero_std_groups
    for name in ("ppo", "sft"):
        settings = resolve([recipe, from_assignments([f"algorithm.name={name}"])]).settings
        assert not getattr(settings.algorithm, "drop_zero_std_groups", False)
    own = dataclasses.replace(recipe, is_recipe=False)  # a file of the user's: its keys are not dropped in silence
    with pytest.raises(SettingsError, match="drop_zero_std_groups"):
        resolve([own, from_assignments(["algorithm.name=sft"])])


def test_a_limit_that_was_raised_above_the_stall_timeout_is_refused():
    with pytest.raises(SettingsError, match=r"tool_timeout_s = 3600 is more than run\.stall_timeout = 1800"):
        settle("rollout.custom_generate_function_path=own.py:play", "rollout.tool_timeout_s=3600")
    settle("rollout.custom_generate_function_path=own.py:play", "rollout.tool_timeout_s=3600", "run.stall_timeout=none")
    settle("run.stall_timeout=5")
