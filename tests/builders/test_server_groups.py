"""Which servers a run starts by its settings, and what hooks are told of them; no server is started here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from slimectl.builders.servers import _router_policy, _server, _specs
from slimectl.engines.sglang.disaggregation import check_transfer
from slimectl.errors import BackendError, SettingsError
from slimectl.settings.layers import Layer
from slimectl.settings.loading import resolve

MODEL = Path("models/policy")


def given(**sections: Any) -> Any:
    return resolve([Layer("test", {"engine": {"backend": "sglang"}} | sections)]).settings


def test_alike_servers_are_behind_a_router_that_knows_prefixes():
    settings = given(engine={"backend": "sglang", "num_engines": 3}, cluster={"rollout_num_gpus_per_engine": 2})
    specs = _specs(settings, MODEL)
    assert [(spec.name, spec.tensor_parallel, spec.role) for spec in specs] == [
        ("engine-0", 2, "regular"), ("engine-1", 2, "regular"), ("engine-2", 2, "regular")
    ]  # fmt: skip
    assert _router_policy(settings) == "cache_aware"
    assert _router_policy(given()) is None
    assert _router_policy(given(engine={"backend": "embedded", "num_engines": 3})) is None


def test_prefill_and_decode_are_servers_of_their_own():
    settings = given(engine={"backend": "sglang", "num_engines": 3}, sglang={"prefill_num_servers": 1})
    specs = _specs(settings, MODEL)
    roles = [("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")]
    assert [(spec.name, spec.role) for spec in specs] == roles
    assert _router_policy(settings) == "cache_aware"


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"engine": {"backend": "sglang", "num_engines": 2, "router": "none"}}, "engine.router: none, but"),
        (
            {"engine": {"backend": "sglang", "num_engines": 2}, "train": {"use_rollout_routing_replay": True}},
            "train.use_rollout_routing_replay and sglang.prefill_num_servers exclude",
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
        f"(ModuleNotFoundError: No module named 'mori'); run: {sys.executable} -m pip install --no-deps mori"
    )
    check_transfer({}, sys.executable, device="cpu", roles=["regular"])


def test_no_router_can_be_asked_for():
    settings = given(engine={"backend": "sglang", "num_engines": 3, "router": "none"})
    assert _router_policy(settings) is None


def test_a_judge_keeps_its_weights_and_needs_no_router():
    groups = [{"name": "policy"}, {"name": "judge", "model": "models/judge", "args": {"mem_fraction_static": 0.3}}]
    settings = given(sglang={"server_groups": groups, "args": {"mem_fraction_static": 0.8}})
    policy, judge = _specs(settings, MODEL)
    assert (policy.gets_weights, policy.args) == (True, {"mem_fraction_static": 0.8})
    assert (judge.gets_weights, judge.args, judge.model) == (False, {"mem_fraction_static": 0.3}, Path("models/judge"))
    assert settings.num_engines == 2
    assert _router_policy(settings) is None


def test_engines_that_share_gpus_may_give_back_memory():
    settings = given(cluster={"colocate": True})
    assert _specs(settings, MODEL)[0].args == {"enable_memory_saver": True}


def test_sglang_keys_without_sglang_are_refused():
    with pytest.raises(SettingsError, match=r'sglang.server_groups .* set engine.backend = "sglang"'):
        given(engine={"backend": "embedded"}, sglang={"server_groups": [{"name": "a"}]})


def test_an_embedded_server_is_slimectl_serve(tmp_path: Path):
    settings = given(engine={"backend": "embedded", "num_engines": 2, "dtype": "bfloat16"})
    server = _server(settings, _specs(settings, MODEL)[1], log=tmp_path / "log", waiting=True)
    command = server._command("127.0.0.1", 30001)
    assert command[1:4] == ["-m", "slimectl", "serve"]
    assert "--wait-for-weights" in command
    assert "engine.dtype=bfloat16" in command
