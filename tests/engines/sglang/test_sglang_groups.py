"""Which servers a run has, as configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import serving

from slimectl.engines.sglang.launch import sglang_server
from slimectl.engines.sglang.topology import ServerSpec, groups_of
from slimectl.engines.supervisor.server_process import ServerOptions
from slimectl.errors import SettingsError

MODEL = Path("models/policy")


def made(**options: Any) -> list[Any]:
    return groups_of(MODEL, **({"num_engines": 2, "gpus_per_engine": 4} | options))


def flags(spec: ServerSpec, folder: Path, **options: Any) -> set[str]:
    """The words of a server's command line."""
    server = sglang_server(spec, ServerOptions(folder / "log", **options), python=serving.python_of("sglang"))
    return set(server.program.command("127.0.0.1", 30000))


def test_engines_are_alike_by_default():
    specs = made(args={"mem_fraction_static": 0.8})
    assert [spec.name for spec in specs] == ["engine-0", "engine-1"]
    assert {(spec.model, spec.tensor_parallel, spec.role, spec.gets_weights) for spec in specs} == {
        (MODEL, 4, "regular", True)
    }
    assert specs[0].args == {"mem_fraction_static": 0.8}
    assert specs[0].router_kind() == {}


def test_prefill_stands_apart_from_decode():
    specs = made(num_engines=5, prefill_num_servers=2)
    assert [(spec.name, spec.role) for spec in specs] == [
        ("prefill-0", "prefill"), ("prefill-1", "prefill"),
        ("decode-0", "decode"), ("decode-1", "decode"), ("decode-2", "decode"),
    ]  # fmt: skip
    assert specs[1].router_kind() == {"worker_type": "prefill"}
    assert specs[2] == ServerSpec("decode-0", MODEL, gpus=4, tensor_parallel=4, role="decode")


@pytest.mark.slow
@pytest.mark.sglang
def test_a_role_becomes_flags_of_the_server(tmp_path: Path, model_dir: Callable[[], Path]):
    def command(i: int, device: str, **args: Any) -> set[str]:
        spec = made(num_engines=2, prefill_num_servers=1)[i]
        words = flags(replace(spec, model=model_dir(), tensor_parallel=1, args=args), tmp_path, device=device)
        return {word for word in words if "disagg" in word or word == "nixl"}

    meeting, tcp = "--disaggregation-bootstrap-port=30001", "--disaggregation-transfer-backend=mooncake_tcp"
    assert command(0, "cuda") == {"--disaggregation-mode=prefill", meeting}
    assert command(0, "cpu") == {"--disaggregation-mode=prefill", meeting, tcp}
    assert command(1, "cpu") == {"--disaggregation-mode=decode", tcp}
    nixl = {"--disaggregation-mode=decode", "--disaggregation-transfer-backend", "nixl"}
    assert command(1, "cpu", disaggregation_transfer_backend="nixl") == nixl


def test_an_engine_of_sixteen_gpus_spans_two_machines_of_eight():
    specs = made(gpus_per_engine=16, gpus_per_node=8, server_groups=[{"name": "big"}, {"num_gpus_per_engine": 4}])
    assert [(spec.name, spec.tensor_parallel, spec.nodes) for spec in specs] == [("big-0", 16, 2), ("engine-0", 4, 1)]
    assert [(part.name, part.node) for part in specs[0].parts()] == [("big-0", 0), ("big-0-node-1", 1)]


@pytest.mark.slow
@pytest.mark.sglang
def test_a_machine_of_an_engine_becomes_flags(tmp_path: Path, model_dir: Callable[[], Path]):
    part = made(num_engines=1, gpus_per_engine=2, gpus_per_node=1)[0].parts()[1]
    assert {"--nnodes=2", "--node-rank=1", "--tp-size=2"} <= flags(replace(part, model=model_dir()), tmp_path)


def test_a_group_of_another_model_gets_no_weights_and_its_own_arguments():
    groups = [
        {"name": "policy", "num_engines": 2, "num_gpus_per_engine": 2},
        {"name": "judge", "model": "models/judge", "num_gpus_per_engine": 8, "args": {"context_length": 8192}},
    ]
    specs = made(server_groups=groups, args={"context_length": 4096, "log_level": "warning"})
    assert [(s.name, str(s.model), s.tensor_parallel, s.gets_weights) for s in specs] == [
        ("policy-0", "models/policy", 2, True), ("policy-1", "models/policy", 2, True),
        ("judge-0", "models/judge", 8, False),
    ]  # fmt: skip
    assert specs[2].args == {"context_length": 8192, "log_level": "warning"}
    assert specs[0].args["context_length"] == 4096


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefill_num_servers": 2}, "sglang.prefill_num_servers: 2 of 2 engines prefill, so none is left to decode"),
        ({"server_groups": [{"nmae": "x"}]}, "sglang.server_groups: nmae: unknown key. Did you mean name?"),
        ({"server_groups": [{"role": "decoder"}]}, "role 'decoder' is not one of regular, prefill, decode"),
        ({"server_groups": [{"name": "x", "num_engines": 0}]}, "x: num_engines: 0 is not a number of at least 1"),
        (
            {"server_groups": [{"role": "prefill"}]},
            "prefill servers cannot work alone. Use both prefill and decode, or neither",
        ),
        ({"server_groups": [{"model": "other"}]}, "no group serves the trained model"),
    ],
)
def test_settings_that_make_no_fleet_are_refused(options: dict[str, Any], words: str):
    with pytest.raises(SettingsError) as refused:
        made(**options)
    assert words in str(refused.value)
