"""New weights over HTTP: disk, shared memory, broadcast; whole versions only, and checksums of what is held."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import aiohttp
import forkserver
import pytest
import torch

from slimectl.checkpoints.create import create_model
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.data.hashing import tensor_checksum
from slimectl.engines.weight_sync.delta import write_delta
from slimectl.engines.weight_sync.delta_format import Versions

Tensors = dict[str, torch.Tensor]
PROMPT = list(b"once upon a time")
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
LONG = GREEDY | {"max_new_tokens": 200}

TRAINER = """
import sys, torch
from datetime import timedelta
from pathlib import Path
from slimectl.checkpoints.hf import HFCheckpoint
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
limit = timedelta(seconds=30)
# As trainers that know SGLang make a group beside the default one.
store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{sys.argv[1]}", 0, 2, timeout=limit))
group, _ = c10d._new_process_group_helper(2, 0, [], c10d.Backend("gloo"), c10d.PrefixStore("g", store),
                                          group_name=c10d.GroupName("g"), timeout=limit)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
tensors = list(dict(HFCheckpoint().read(Path(sys.argv[2]))).values())
if sys.argv[3] == "one_by_one":
    for tensor in tensors:
        dist.broadcast(tensor, src=0, group=group)
else:
    dist.broadcast(torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors]), src=0, group=group)
sys.stdin.read()
dist.destroy_process_group(group)
"""


@pytest.fixture(scope="module")
def other(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape."""
    import json

    folder = tmp_path_factory.mktemp("other")
    create_model(json.loads((model_dir("llama") / "config.json").read_text()), folder, seed=8)
    return folder


@pytest.fixture
def tensors(other: Path) -> Tensors:
    return dict(HFCheckpoint().read(other))


@pytest.fixture(autouse=True)
def old_weights(server: Any, model_dir: Callable[[str], Path]) -> Iterator[None]:
    """Every test begins, and leaves the server, with the weights of version 0."""
    yield
    server.ask("/end_weight_update", {})
    server.good("/continue_generation", {})
    server.good("/update_weights_from_disk", {"model_path": str(model_dir("llama")), "weight_version": "0"})


@contextlib.contextmanager
def laid_out(tensors: Tensors) -> Iterator[dict[str, Any]]:
    """Tensors in a block of shared memory, and the table of them."""
    block = SharedMemory(create=True, size=sum(tensor.nbytes for tensor in tensors.values()))
    table, at = [], 0
    for name, tensor in tensors.items():
        block.buf[at : at + tensor.nbytes] = tensor.flatten().view(torch.uint8).numpy().tobytes()
        table.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), at])
        at += tensor.nbytes
    try:
        yield {"load_format": "shared_memory", "name": block.name, "tensors": table}
    finally:
        block.close()
        block.unlink()


def written(server: Any) -> tuple[list[int], str]:
    answer = server.good("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY})
    return answer["output_ids"], answer["meta_info"]["weight_version"]


@pytest.fixture
def wanted(server: Any, serving: Callable[..., Any], other: Path) -> list[int]:
    """What the other weights write, in a server of their own."""
    with serving(other) as fresh:
        tokens = written(fresh)[0]
    assert tokens != written(server)[0]
    return tokens


def test_from_disk(server: Any, other: Path, wanted: list[int]) -> None:
    answer = server.good("/update_weights_from_disk", {"model_path": str(other), "weight_version": "3"})
    assert (answer["success"], answer["num_paused_requests"]) == (True, 0)
    assert written(server) == (wanted, "3")
    assert server.good("/model_info")["weight_version"] == "3"


def test_from_a_delta_where_the_engine_has_its_first_version(
    server: Any, model_dir: Callable[[str], Path], tensors: Tensors, wanted: list[int], tmp_path: Path
) -> None:
    before = tmp_path / "before"  # stays as it is: what the delta changes is not read from there
    shutil.copytree(model_dir("llama"), before)
    (before / "weight_version.txt").write_text("0")
    delta, versions = tmp_path / "0-to-6.delta", Versions("0", "6")
    write_delta(iter(tensors.items()), target=delta, base=before, versions=versions, dtype=None)
    body = {"model_path": str(before), "weight_version": "6", "delta": str(delta)}
    old = written(server)
    server.good("/update_weights_from_disk", body)
    assert written(server) == (wanted, "6")
    (rank,) = server.good("/weights_checker", {"action": "checksum"})["ranks"]
    assert rank["checksums"] == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    server.good("/update_weights_from_disk", body)  # from version 6 it does not fit, and the folder is read
    assert written(server) == (old[0], "6")
    server.good("/update_weights_from_disk", body | {"delta": str(tmp_path / "none.delta")})
    assert written(server) == (old[0], "6")


def test_from_shared_memory_in_several_calls(server: Any, tensors: Tensors, wanted: list[int]) -> None:
    before = written(server)
    names = list(tensors)
    server.good("/begin_weight_update", {})
    for half in (names[: len(names) // 2], names[len(names) // 2 :]):
        with laid_out({name: tensors[name] for name in half}) as body:
            server.good("/update_weights_from_tensor", body | {"weight_version": "4"})
        assert server.good("/model_info")["weight_version"] == before[1]
    server.good("/end_weight_update", {})
    assert written(server) == (wanted, "4")
    (rank,) = server.good("/weights_checker", {"action": "checksum"})["ranks"]
    assert rank["checksums"] == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("way", ["one_by_one", "flattened_bucket"])
def test_from_a_broadcast(way: str, server: Any, other: Path, tensors: Tensors, wanted: list[int]) -> None:
    with SharedPort() as port:
        words = [str(port), str(other), way]
        trainer = forkserver.start_python(TRAINER, words, cwd=other, stdin=subprocess.PIPE)
    try:
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        server.good("/init_weights_update_group", {**place, "group_name": "g", "backend": "gloo"})
        body = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": "g",
            "weight_version": "5",
        }
        if way != "one_by_one":
            body["load_format"] = way
        server.good("/begin_weight_update", {})
        server.good("/update_weights_from_distributed", body)
        server.good("/end_weight_update", {})
        assert written(server) == (wanted, "5")
        server.good("/destroy_weights_update_group", {"group_name": "g"})
    finally:
        trainer.communicate(timeout=300)
    assert trainer.returncode == 0
    assert "does not exist" in server.ask("/destroy_weights_update_group", {"group_name": "g"})[1]["message"]


class SharedPort:
    """A port that nobody has."""

    def __enter__(self) -> int:
        from slimectl.system.listening import bound

        with bound("127.0.0.1", 0) as probe:
            return int(probe.getsockname()[1])

    def __exit__(self, *_: object) -> None: ...


def test_a_trainer_that_dies_is_an_error_and_the_group_can_be_left(server: Any, other: Path, tensors: Tensors) -> None:
    with SharedPort() as port:
        words = [str(port), str(other), "one_by_one"]
        trainer = forkserver.start_python(TRAINER, words, cwd=other, stdin=subprocess.PIPE)
    place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    server.good("/init_weights_update_group", {**place, "group_name": "g", "backend": "gloo"})
    trainer.kill()
    trainer.communicate()
    body = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1 << 24]], "group_name": "g"}
    status, answer = server.ask("/update_weights_from_distributed", body)
    assert (status, answer["success"]) == (400, False)
    assert "the broadcast failed" in answer["message"]
    server.good("/destroy_weights_update_group", {"group_name": "g"})
    assert written(server)[1] == "0"


def test_a_version_in_the_middle_of_an_answer(server: Any, other: Path, ask: Callable[..., Any]) -> None:
    async def scene(session: aiohttp.ClientSession) -> Any:
        steps = server.engine.stats.steps
        task = asyncio.create_task(ask(session, "/generate", {"input_ids": PROMPT, "sampling_params": LONG}))
        while server.engine.stats.steps < steps + 10:
            await asyncio.sleep(0.001)
        await ask(session, "/pause_generation", {"mode": "in_place"})
        await ask(session, "/update_weights_from_disk", {"model_path": str(other), "weight_version": "1"})
        await ask(session, "/continue_generation", {})
        return (await task)[1]["meta_info"]

    meta = server.run(scene)
    old, new = meta["weight_versions"]
    assert (old["version"], old["start"], new["version"], new["end"]) == ("0", 0, "1", 200)
    assert 10 <= old["end"] == new["start"] < 200
    assert meta["weight_version"] == "1"


def test_parts_that_do_not_fit_are_refused_and_the_engine_serves_on(server: Any, tensors: Tensors) -> None:
    before = written(server)
    name = "model.layers.1.self_attn.q_proj.weight"
    for wrong, named in (
        ({name: torch.zeros(3, 64)}, "has shape [3, 64], expected [64, 64]"),
        ({"model.layers.7.mlp.up_proj.weight": torch.zeros(3)}, "is not part of this llama model"),
    ):
        server.good("/begin_weight_update", {})
        with laid_out(wrong) as body:
            status, answer = server.ask("/update_weights_from_tensor", body)
        assert (status, answer["success"]) == (400, False)
        assert named in answer["message"]
        server.good("/end_weight_update", {})
        assert written(server) == before


def test_a_set_with_a_tensor_missing_is_no_version(server: Any, tensors: Tensors, wanted: list[int]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    server.good("/begin_weight_update", {})
    with laid_out({other: tensor for other, tensor in tensors.items() if other != name}) as body:
        server.good("/update_weights_from_tensor", body | {"weight_version": "6"})
    status, answer = server.ask("/end_weight_update", {})
    assert (status, answer["success"]) == (400, False)
    assert f"no tensor for {name}" in answer["message"]
    assert server.ask("/health")[0] == 503
    status, answer = server.ask("/generate", {"input_ids": PROMPT})
    assert status == 503
    assert "no weights" in answer["error"]["message"]
    with laid_out({name: tensors[name]}) as body:
        server.good("/update_weights_from_tensor", body)
    assert written(server) == (wanted, "6")


def test_sessions_do_not_nest(server: Any) -> None:
    server.good("/begin_weight_update", {})
    assert "already open" in server.ask("/begin_weight_update", {})[1]["message"]
    server.good("/end_weight_update", {})
    assert "no weight-update session" in server.ask("/end_weight_update", {})[1]["message"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("tensor", {"serialized_named_tensors": ["gASV"]}, "pickles are not supported"),
        ("tensor", {"load_format": "shared_memory", "name": "../etc/passwd", "tensors": []}, "is not the name"),
        ("tensor", {"load_format": "shared_memory", "name": "no_such_block", "tensors": []}, "No such file"),
        ("disk", {"model_path": "/nowhere"}, "is not a directory"),
        ("disk", {"model_path": "/"}, "safetensors"),
        ("disk", {}, "model_path: is missing"),
        ("distributed", {"names": [], "dtypes": [], "shapes": []}, "no such group"),
    ],
)
def test_what_cannot_be_taken_is_refused(path: str, body: dict[str, Any], named: str, server: Any) -> None:
    status, answer = server.ask(f"/update_weights_from_{path}", body)
    assert (status, answer["success"]) == (400, False)
    assert named in answer["message"]


@pytest.mark.parametrize(
    "row", [["a", "float32", [4], 1], ["a", "float32", [4], 4], ["a", "float32", [1 << 50], 0], ["a", "object", [1], 0]]
)
def test_tables_that_lie_are_refused(row: list[Any], server: Any) -> None:
    with laid_out({"a": torch.zeros(4)}) as body:
        status, answer = server.ask("/update_weights_from_tensor", body | {"tensors": [row]})
    assert status == 400
    assert answer["message"].startswith("tensors: ")


def test_a_server_that_waits_for_weights_says_so_and_answers_when_they_have_come(
    serving: Callable[..., Any], model_dir: Callable[[str], Path], tensors: Tensors, wanted: list[int]
) -> None:
    with serving(model_dir("llama"), load=False) as waiting:
        waiting.service.status = "waiting for weights"
        assert waiting.ask("/ping") == (200, {"status": "waiting for weights"})
        assert waiting.ask("/health") == (503, {"status": "waiting for weights"})
        status, answer = waiting.ask("/generate", {"input_ids": PROMPT})
        assert (status, "waiting for weights" in answer["error"]["message"]) == (503, True)
        waiting.good("/pause_generation", {"mode": "abort"})
        waiting.good("/begin_weight_update", {})
        with laid_out(tensors) as body:
            waiting.good("/update_weights_from_tensor", body | {"weight_version": "9"})
        waiting.good("/end_weight_update", {})
        waiting.good("/flush_cache", {})
        waiting.good("/continue_generation", {})
        assert waiting.ask("/health") == (200, {"status": "ok"})
        assert written(waiting) == (wanted, "9")
