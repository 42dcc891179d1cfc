"""The engines that recipes for GPUs start: their GPUs, how weights reach them, and flags that SGLang accepts there."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import serving
import torch
from executors.ray_cases import http_server

from slimectl.architectures import cards
from slimectl.architectures.config import with_defaults
from slimectl.engines.sglang import weight_client
from slimectl.engines.weight_sync.distributed import DistributedSync
from slimectl.engines.weight_sync.memory import TensorSync
from slimectl.errors import BackendError, SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.planner.placement import Placement
from slimectl.runtime import builders
from slimectl.runtime.builders.engines import engine_backend
from slimectl.runtime.builders.executors import executor_backend
from slimectl.runtime.builders.weight_sync import check_transport
from slimectl.runtime.stage_functions import load_settings

ONE_GPU = ("qwen3-1.7b-lora-24gb", "qwen3-1.7b-h100", "qwen3-8b-lora-h100")
SHARED, APART, TWO_MACHINES = "qwen3-8b-8xh100", "qwen3-8b-8xh100-async", "qwen3-30b-a3b-2x8h100"
ALL = (*ONE_GPU, SHARED, APART, TWO_MACHINES)
EIGHT = [f"GPU-{i}" for i in range(8)]
Machine = Callable[[list[str]], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`machine(names)`: torch finds a GPU, and these are visible."""

    def show(names: list[str]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))

    return show


@pytest.mark.parametrize(
    ("name", "expected"), [*((name, EIGHT[:1]) for name in ONE_GPU), (SHARED, EIGHT), (APART, EIGHT[4:])]
)
def test_every_engine_sees_only_its_gpu(name: str, expected: list[str], machine: Machine, tmp_path: Path):
    machine(EIGHT)
    settings = load_settings(name)
    specs = engine_backend(settings).specs(settings, tmp_path)
    with closing(builders.executor(settings)) as executor:
        servers = [
            executor.host(partial(http_server, tmp_path / "log"), name=spec.name, gpus=spec.gpus) for spec in specs
        ]
        ranks = [executor.rank_beside(spec.name) for spec in specs]
    assert [server.options.env["CUDA_VISIBLE_DEVICES"] for server in servers] == expected
    assert ranks == ([None] * 4 if name == APART else list(range(len(specs))))


def test_the_process_of_an_engine_gets_its_gpus(tmp_path: Path):
    server = http_server(tmp_path / "log")
    server.show_gpus(["2", "5"])
    server.start()
    try:
        assert b"CUDA_VISIBLE_DEVICES=2,5" in Path(f"/proc/{server.pid()}/environ").read_bytes().split(b"\0")
    finally:
        server.stop()


def test_an_engine_that_joins_gets_a_free_gpu_and_one_that_left_returns_its_own(tmp_path: Path):
    placement = Placement(actor_gpus_per_node=1, engine_gpus=(1, 1))
    with closing(LocalExecutor(placement=placement, gpus=["4", "5", "6", "7"])) as executor:

        def gpu_of(name: str) -> str:
            server = executor.host(partial(http_server, tmp_path / "log"), name=name, gpus=1)
            gpu: str = server.options.env["CUDA_VISIBLE_DEVICES"]
            return gpu

        assert [gpu_of(f"engine-{i}") for i in (0, 1, 2, 2)] == ["5", "6", "7", "7"]
        with pytest.raises(BackendError, match="engine-3 needs 1 free GPUs, but this machine has only 0 free"):
            gpu_of("engine-3")
        executor.end_host("engine-0")
        assert gpu_of("engine-3") == "5"
        executor.end_host("engine-2")
        assert gpu_of("engine-4") == "7"


def test_a_machine_with_too_few_gpus_is_refused_before_anything_starts(machine: Machine):
    machine(EIGHT[:4])
    with pytest.raises(SettingsError, match=r"need 8 GPUs, but this machine shows 4\. Use fewer, or let engines and"):
        executor_backend(load_settings(APART)).check(load_settings(APART))


@pytest.mark.parametrize(
    ("name", "kind", "ranks"),
    [
        *((name, TensorSync, [0]) for name in ONE_GPU),
        (SHARED, TensorSync, list(range(8))),
        (TWO_MACHINES, TensorSync, [0, 4, 8, 12]),
        (APART, DistributedSync, []),
    ],
)
def test_engines_on_the_trainers_gpus_get_weights_from_the_rank_there(
    name: str, kind: type, ranks: list[int], machine: Machine, tmp_path: Path
):
    """NCCL cannot connect two processes of one GPU, and memory of one GPU is invisible to engines on another."""
    machine(EIGHT)
    settings, urls = load_settings(name), [f"http://10.0.0.{i}:1" for i in range(max(1, len(ranks)))]
    receivers = Mock(urls=urls, shares_memory=False, adapter_transports=("tensor",))  # as SglangWorkers has
    rank_of = dict(zip(urls, ranks, strict=False)).get
    (tmp_path / "config.json").write_text("{}")
    sync: Any = builders.to_servers(settings, Mock(), receivers, model=tmp_path, folder=tmp_path, rank_of=rank_of)
    assert type(sync) is kind
    if kind is TensorSync:
        assert [sync.rank_of(url) for url in urls] == ranks
        with pytest.raises(
            SettingsError, match=r"no training rank shares the GPU of the engine at http://10\.0\.0\.99:1"
        ):
            sync.rank_of("http://10.0.0.99:1")


@pytest.mark.parametrize(("name", "transport"), [(SHARED, "distributed"), (APART, "tensor")])
def test_a_transport_that_cannot_work_between_these_gpus_is_refused(name: str, transport: str, machine: Machine):
    check_transport(load_settings(name, {"sync.transport": transport}))  # on a CPU
    machine(EIGHT)
    with pytest.raises(SettingsError, match=f"sync.transport: {transport}, but (nccl|SGLang)"):
        check_transport(load_settings(name, {"sync.transport": transport}))


RESOLVE = """
import json, os, sys, types
import torch
import sglang.srt.arg_groups.pipeline, sglang.srt.configs.model_config, sglang.srt.layers.quantization
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import MultiprocessingSerializer
gpu = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=85 * 10**9, uuid="GPU-0")
torch.version.cuda, torch.cuda.is_available, torch.cuda.device_count = "13.0", lambda: True, lambda: 8
torch.cuda.get_device_capability, torch.cuda.current_device = lambda *_: (9, 0), lambda: 0
torch.cuda.get_device_properties, torch.cuda.get_device_name = lambda *_: gpu, lambda *_: gpu.name
torch.cuda.mem_get_info = lambda *_: (84 * 10**9, 85 * 10**9)
given = json.load(sys.stdin)
for words, environment in given["lines"]:
    os.environ.update(environment)
    arguments = prepare_server_args(words)
    arguments.resolve_once()
    arguments.check_server_args()
    print("resolved", json.dumps({name: arguments.resolved_dict()[name] for name in sys.argv[1:]}))
from torch.multiprocessing import reductions
reductions.rebuild_cuda_tensor = lambda *arguments: arguments
message = MultiprocessingSerializer.deserialize(given["message"])
print("opened", json.dumps([str(message["flattened_tensor"][6]), [at.name for at in message["metadata"]]]))
"""
"""Resolves command lines as SGLang does when it starts on an H100, without one, and reads a message of weights."""


def message_on_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """A message for SGLang with the handle of a tensor on GPU-3. Only CUDA's own part of the handle is missing."""
    handle = (torch.Tensor, (4,), (1,), 0, torch.UntypedStorage, torch.uint8, 3, b"h", 4, 0, False, b"r", 0, b"e", True)
    rebuild = torch.multiprocessing.reductions.rebuild_cuda_tensor
    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", lambda _: (rebuild, handle))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Mock(uuid=f"GPU-{index}"))
    flat, places = weight_client.flatten([("a", torch.zeros(1))])
    data = pickle.dumps({"flattened_tensor": weight_client._Handle(flat), "metadata": places})
    return base64.b64encode(data).decode()


@pytest.mark.slow
@pytest.mark.sglang
def test_sglang_resolves_the_flags_of_every_recipe_for_a_gpu_and_opens_a_message(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    machine(EIGHT)
    python, lines = serving.python_of("sglang"), []
    for name in ALL:
        settings = load_settings(name, {"sglang.python": python})
        folder = tmp_path / name
        folder.mkdir()
        config = with_defaults(cards.load(str(cards.named(str(settings.model.path))))["config"])
        architecture = "Qwen3MoeForCausalLM" if "num_experts" in config else "Qwen3ForCausalLM"
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        backend = engine_backend(settings)
        server = backend.server(settings, backend.specs(settings, folder)[0], log=tmp_path / "log", waiting=True)
        lines.append((server.program.command("127.0.0.1", 30000)[3:], dict(server.program.env)))
    given = {"lines": lines, "message": message_on_gpu(monkeypatch)}
    fields = ("device", "tp_size", "mem_fraction_static", "enable_memory_saver", "enable_return_routed_experts")
    result = subprocess.run(
        [python, "-E", "-c", RESOLVE, *fields], input=json.dumps(given), env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    resolved = [json.loads(line[9:]) for line in result.stdout.splitlines() if line.startswith("resolved ")]
    assert [tuple(row.values()) for row in resolved] == [
        ("cuda", 1, 0.6, True, False),
        ("cuda", 1, 0.7, True, False),
        ("cuda", 1, 0.6, True, False),
        ("cuda", 1, 0.7, True, False),
        ("cuda", 1, 0.85, False, False),
        ("cuda", 4, 0.7, True, True),
    ]
    assert 'opened ["GPU-3", ["a"]]' in result.stdout.splitlines()
