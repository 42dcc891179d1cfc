"""Which servers a run starts by its settings, and what hooks are told of them; no server is started here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from slimectl.engines.sglang.disaggregation import check_transfer
from slimectl.errors import BackendError, SettingsError
from slimectl.runtime.builders.engines import engine_backend
from slimectl.runtime.builders.executors import placement
from slimectl.runtime.builders.servers import _router_policy, _server
from slimectl.settings.layers import Layer
from slimectl.settings.loading import resolve

MODEL = Path("models/policy")


def specs_of(settings: Any) -> list[Any]:
    return engine_backend(settings).specs(settings, MODEL)


def given(**sections: Any) -> Any:
    return resolve([Layer("test", {"engine": {"backend": "sglang"}} | sections)]).settings


def test_alike_servers_are_behind_a_router_that_knows_prefixes():
    settings = given(engine={"backend": "sglang", "num_engines": 3}, cluster={"rollout_num_gpus_per_engine": 2})
    specs = specs_of(settings)
    assert [(spec.name, spec.tensor_parallel, spec.role) for spec in specs] == [
        ("engine-0", 2, "regular"), ("engine-1", 2, "regular"), ("engine-2", 2, "regular")
    ]  # fmt: skip
    assert _router_policy(settings) == "cache_aware"
    assert _router_policy(given()) is None
    assert _router_policy(given(engine={"backend": "embedded", "num_engines": 3})) is None


def test_prefill_and_decode_are_servers_of_their_own():
    settings = given(engine={"backend": "sglang", "num_engines": 3}, sglang={"prefill_num_servers": 1})
    specs = specs_of(settings)
    roles = [("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")]
    assert [(spec.name, spec.role) for spec in specs] == roles
    assert _router_policy(settings) == "cache_aware"


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"engine": {"backend": "sglang", "num_engines": 2, "router": "none"}}, "engine.router: none, but"),
        (
            {"engine": {"backend": "sglang", "num_engines": 2}, "train": {"use_rollout_routing_replay": True}},
            "train.use_rollout_routing_replay and sglang.prefill_num_servers cannot",
        ),
    ],
)
def test_what_prefill_and_decode_cannot_do_is_refused(others: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words):
        given(sglang={"prefill_num_servers": 1}, **others)


def test_a_missing_library_that_hands_over_the_cache_is_named_before_anything_starts():
    with pytest.raises(BackendError) as refused:
        check_transfer({"disaggregation_transfer_backend": "mori"}, sys.executable, device="cpu", roles=["prefill"])
    assert str(refused.value) == (
        f"sglang.args.disaggregation_transfer_backend: mori: {sys.executable} cannot import mori.io "
        f"(ModuleNotFoundError: No module named 'mori'). Run: {sys.executable} -m pip install --no-deps mori"
    )
    check_transfer({}, sys.executable, device="cpu", roles=["regular"])


TWO_MACHINES = {"rollout_num_gpus_per_engine": 2, "num_gpus_per_node": 1}


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"engine": {"backend": "vllm"}}, 'an engine of vllm runs on one. Set engine.backend = "sglang", or lower it.'),
        ({}, 'Set cluster.executor = "ray", or engine.device = "cpu" for processes on this one.'),
        (
            {"cluster": TWO_MACHINES | {"executor": "ray"}, "sync": {"transport": "tensor"}},
            "sync.transport: tensor reaches only the trainer's. Use distributed, disk or delta.",
        ),
    ],
)
def test_an_engine_over_machines_is_refused_where_it_cannot_be(others: dict[str, Any], words: str):
    with pytest.raises(SettingsError) as refused:
        given(**({"cluster": TWO_MACHINES} | others))
    size = "cluster.rollout_num_gpus_per_engine: 2 needs 2 machines of cluster.num_gpus_per_node: 1"
    assert size in str(refused.value)
    assert words in str(refused.value)


def test_an_engine_over_machines_has_a_part_on_each():
    settings = given(cluster=TWO_MACHINES | {"executor": "ray"}, engine={"backend": "sglang", "num_engines": 2})
    assert [part.name for spec in specs_of(settings) for part in spec.parts()] == [
        "engine-0", "engine-0-node-1", "engine-1", "engine-1-node-1"
    ]  # fmt: skip
    assert [part.gpus for part in placement(settings).parts] == [1, 1, 1, 1]


def test_groups_of_engines_have_the_gpus_that_each_names():
    groups = [
        {"name": "policy", "num_engines": 2},
        {"name": "judge", "model": "models/judge", "num_gpus_per_engine": 4},
    ]
    settings = given(cluster={"rollout_num_gpus_per_engine": 2}, sglang={"server_groups": groups})
    assert [(spec.name, spec.gpus) for spec in specs_of(settings)] == [
        ("policy-0", 2), ("policy-1", 2), ("judge-0", 4)
    ]  # fmt: skip
    assert (placement(settings).engine_gpus, settings.rollout_gpus) == ((2, 2, 4), 8)


def test_pipeline_stages_share_the_gpus_of_an_engine():
    settings = given(cluster={"rollout_num_gpus_per_engine": 4}, sglang={"args": {"pp_size": 2}})
    (spec,) = specs_of(settings)
    assert (spec.gpus, spec.tensor_parallel) == (4, 2)
    with pytest.raises(SettingsError, match="pp_size: 3 pipeline stages do not divide the 4 GPUs of engine"):
        specs_of(given(cluster={"rollout_num_gpus_per_engine": 4}, sglang={"args": {"pp_size": 3}}))


def test_experts_are_asked_for_without_a_router():
    replay = {"train": {"use_rollout_routing_replay": True}}
    assert _router_policy(given(engine={"backend": "sglang", "num_engines": 3}, **replay)) is None
    with pytest.raises(SettingsError, match=r"sglang-router 0\.3\.2 does not forward requests for experts"):
        given(engine={"backend": "sglang", "num_engines": 3, "router": "random"}, **replay)


def test_no_router_can_be_asked_for():
    settings = given(engine={"backend": "sglang", "num_engines": 3, "router": "none"})
    assert _router_policy(settings) is None


def test_a_judge_keeps_its_weights_and_needs_no_router():
    groups = [{"name": "policy"}, {"name": "judge", "model": "models/judge", "args": {"mem_fraction_static": 0.3}}]
    settings = given(sglang={"server_groups": groups, "args": {"mem_fraction_static": 0.8}})
    policy, judge = specs_of(settings)
    assert (policy.gets_weights, policy.args) == (True, {"mem_fraction_static": 0.8})
    assert (judge.gets_weights, judge.args, judge.model) == (False, {"mem_fraction_static": 0.3}, Path("models/judge"))
    assert settings.num_engines == 2
    assert _router_policy(settings) is None


def test_engines_that_share_gpus_may_give_back_memory():
    settings = given(cluster={"colocate": True})
    assert specs_of(settings)[0].args == {"enable_memory_saver": True}


def test_sglang_keys_without_sglang_are_refused():
    with pytest.raises(SettingsError, match=r'sglang.server_groups .* Set engine.backend = "sglang"'):
        given(engine={"backend": "embedded"}, sglang={"server_groups": [{"name": "a"}]})


def test_an_embedded_server_is_slimectl_serve(tmp_path: Path):
    settings = given(engine={"backend": "embedded", "num_engines": 2, "dtype": "bfloat16"})
    server = _server(settings, specs_of(settings)[1], log=tmp_path / "log", waiting=True)
    command = server.program.command("127.0.0.1", 30001)
    assert command[1:4] == ["-m", "slimectl", "serve"]
    assert "--wait-for-weights" in command
    assert "engine.dtype=bfloat16" in command
