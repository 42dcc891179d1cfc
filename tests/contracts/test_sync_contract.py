"""What every transport promises (sync/): the engines sample from the policy's weights, or the push says why not."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import serving
import torch
from transformers import AutoConfig, AutoTokenizer

from slimectl.algorithms.losses import SftLoss
from slimectl.checkpoints.hf import HFCheckpoint, write_model
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.http.weight_client import HttpWorkers
from slimectl.engines.supervisor.server_process import ServerProcess
from slimectl.engines.weight_sync import distributed, memory
from slimectl.engines.weight_sync.base import InProcessSync, WeightSyncBase
from slimectl.engines.weight_sync.delta import DeltaSync
from slimectl.engines.weight_sync.disk import DiskSync
from slimectl.engines.weight_sync.distributed import DistributedSync
from slimectl.engines.weight_sync.memory import TensorSync
from slimectl.engines.weight_sync.process_groups import start_broadcast
from slimectl.engines.weight_sync.verify import VerifiedSync
from slimectl.errors import BackendError
from slimectl.executors.local import LocalExecutor
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.lora import LoraOptions
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.rank_group import DistributedPolicy
from slimectl.protocols import NamedTensors, Policy
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.types import Completion, SamplingParams, TrainingSample

pytestmark = pytest.mark.slow

PROMPT = list(b"once upon a time")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
MESSAGE_BYTES = 100_000  # several messages, of the small model's 360 kB

ModelDir = Callable[..., Path]


def alone(folder: Path) -> Policy:
    return FsdpPolicy(folder, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.02)))


class Held:
    """A policy that has the tensors that it is given."""

    def __init__(self, tensors: NamedTensors, version: str) -> None:
        self.tensors, self.weight_version = list(tensors), version

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors)

    def consume_weights(self, consumer: Callable[[NamedTensors], Any]) -> Any:
        return consumer(self.weights())


@pytest.fixture(scope="module")
def policies(model_dir: ModelDir) -> Iterator[dict[str, Policy]]:
    """A policy in one process, and one over two ranks, which take all steps of this module."""
    build = partial(alone, model_dir())
    executor = LocalExecutor()
    group = DistributedPolicy(executor, build, ranks=2)
    yield {"one process": build(), "two ranks": group}
    group.close()
    executor.close()


@pytest.fixture(params=["one process", "two ranks"])
def policy(request: pytest.FixtureRequest, policies: dict[str, Policy]) -> Policy:
    return policies[request.param]


@pytest.fixture(params=serving.SERVERS)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


KINDS = ["disk", "delta", "tensor", "distributed"]
PAIRS = [
    pytest.param(("one process", "two ranks")[(i + j) % 2], *server.values, kind, marks=server.marks)
    for i, server in enumerate(serving.SERVERS) for j, kind in enumerate(KINDS)
]  # fmt: skip
"""Every transport to every server, and each of both from one process and from two ranks."""
pushes = pytest.mark.parametrize(("policy", "url", "kind"), PAIRS, indirect=["policy", "url"])


def transport(kind: str, policy: Policy, workers: HttpWorkers, model: Path, folder: Path) -> WeightSyncBase:
    write = partial(write_model, model)
    if kind == "disk":
        return DiskSync(policy, workers, folder=folder, write=write)
    if kind == "delta":
        return DeltaSync(policy, workers, folder=folder, write=write)
    if kind == "tensor":
        return TensorSync(policy, workers, buffer_bytes=MESSAGE_BYTES)
    return DistributedSync(policy, workers, buffer_bytes=MESSAGE_BYTES, timeout_s=60)


Make = Callable[..., WeightSyncBase]


@pytest.fixture
def make(model_dir: ModelDir, tmp_path: Path) -> Iterator[Make]:
    """`make("disk", policy, urls)`; closed afterwards."""
    made: list[WeightSyncBase] = []

    def one(kind: str, policy: Policy, urls: list[str], *, timeout_s: float = 60.0) -> WeightSyncBase:
        workers = serving.workers(urls, timeout_s=timeout_s)
        made.append(transport(kind, policy, workers, model_dir(), tmp_path / f"weights-{len(made)}"))
        return made[-1]

    yield one
    for sync in made:
        sync.close()
    assert not [path for path in tmp_path.glob("weights-*/*") if path.suffix != ".delta"]


def answers(urls: list[str], model: Path, *, params: SamplingParams = GREEDY) -> list[Completion]:
    """What each server writes by itself."""

    async def asked() -> list[Completion]:
        engines = [serving.client([url], model, connect_timeout_s=10) for url in urls]
        found = await asyncio.gather(*(engine.generate(PROMPT, params=params) for engine in engines))
        for engine in engines:
            await engine.close()
        return list(found)

    return asyncio.run(asked())


def expected(policy: Policy, model: Path) -> list[int]:
    """What the policy's weights write, loaded afresh into an engine of its own."""
    fresh = EmbeddedEngine(AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model))
    fresh.load_weights(policy.weights(), version="afresh")
    return asyncio.run(fresh.generate(PROMPT, params=GREEDY)).tokens


def trained(policy: Policy) -> None:
    """A step towards another answer, large enough to be heard in greedy ones."""
    tokens = [*PROMPT, *((int(policy.weight_version) * 7 + i) % 256 for i in range(8))]
    policy.forward_backward([TrainingSample(tokens=tokens, response_length=8, loss_weights=[1 / 8] * 8)], SftLoss())
    policy.optim_step()


def train_to_another_answer(policy: Policy, tokens: list[int], model: Path) -> None:
    """Step until the policy's greedy answer is no longer `tokens`: a push that did nothing then shows."""
    for _ in range(10):
        trained(policy)
        if expected(policy, model) != tokens:
            return
    raise AssertionError("ten steps did not change the greedy answer")


@pushes
def test_after_a_push_an_engine_writes_what_the_weights_write(
    kind: str, policy: Policy, url: str, make: Make, model_dir: ModelDir
):
    sync = make(kind, policy, [url])
    for _ in range(3):
        metrics = sync.push()
        assert metrics["bytes"] > 0
        assert metrics["pause_time"] > 0
        (answer,) = answers([url], model_dir())
        assert answer.tokens == expected(policy, model_dir())
        assert answer.weight_versions == [policy.weight_version]
        train_to_another_answer(policy, answer.tokens, model_dir())


def test_the_rank_on_the_gpu_of_an_engine_sends_to_it(policies: dict[str, Policy], served: str, model_dir: ModelDir):
    policy, workers = policies["two ranks"], serving.workers([served], timeout_s=60)
    train_to_another_answer(policy, answers([served], model_dir())[0].tokens, model_dir())
    sync = TensorSync(policy, workers, buffer_bytes=MESSAGE_BYTES, rank_of={served: 1}.__getitem__)
    assert sync.push()["bytes"] > 0
    (answer,) = answers([served], model_dir())
    assert answer.tokens == expected(policy, model_dir())
    assert answer.weight_versions == [policy.weight_version]


@pytest.mark.parametrize("kind", ["disk", "delta"])
def test_a_function_of_the_users_sees_what_was_written_before_engines_read_it(
    kind: str, served: str, model_dir: ModelDir, tmp_path: Path
):
    """The example of sync.custom_post_write_path: it could copy to other machines, or take away."""
    (tmp_path / "own.py").write_text(
        "def wrote(args, version_dir, rollout_engines):\n"
        "    with open(args.update_weight_disk_dir + '.log', 'a') as file:\n"
        "        file.write(f'{version_dir.name} {version_dir.exists()} {rollout_engines.ranks}\\n')\n"
    )
    given = {"transport": kind, "update_weight_disk_dir": f"{tmp_path}/pushed", "update_weight_disk_keep_files": True}
    sync = Settings.model_validate({"sync": {**given, "custom_post_write_path": f"{tmp_path}/own.py:wrote"}})
    policy, workers = alone(model_dir()), serving.workers([served], timeout_s=60)
    transport = builders.to_servers(sync, policy, workers, model=model_dir(), folder=tmp_path)
    for _ in range(2):
        transport.push()
        trained(policy)
    transport.close()
    names = {"disk": ["weights_0", "weights_1"], "delta": ["current", "0-to-1.delta"]}[kind]
    assert (tmp_path / "pushed.log").read_text().splitlines() == [f"{name} True [1]" for name in names]


@pytest.mark.sglang
@pytest.mark.parametrize("kind", KINDS)
def test_two_engines_get_the_same_weights(
    kind: str, policy: Policy, served: str, sglang: str, make: Make, model_dir: ModelDir
):
    make(kind, policy, [served, sglang]).push()
    first, second = answers([served, sglang], model_dir())
    assert first.tokens == second.tokens == expected(policy, model_dir())
    assert first.weight_versions == second.weight_versions == [policy.weight_version]


def test_an_engine_in_this_process_gets_the_weights_as_well(policy: Policy, model_dir: ModelDir):
    model = model_dir()
    engine = EmbeddedEngine(AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model))
    sync = InProcessSync(policy, engine)
    trained(policy)
    assert sync.push()["bytes"] == sum(tensor.nbytes for _, tensor in policy.weights())
    answer = asyncio.run(engine.generate(PROMPT, params=GREEDY))
    assert answer.tokens == expected(policy, model)
    assert answer.weight_versions == [policy.weight_version]
    sync.close()


def answers_during(url: str, model: Path, push: Callable[[], Any]) -> list[Completion]:
    """All answers of eight clients that ask again and again until a push in another thread is done."""

    async def scene() -> list[Completion]:
        engine = serving.client([url], model)
        pushed = asyncio.Event()

        async def ask(max_tokens: int) -> list[Completion]:
            params, completions = dataclasses.replace(LONG, max_tokens=max_tokens), []
            while not pushed.is_set():
                completions.append(await engine.generate(PROMPT, params=params))
            return completions

        clients = [asyncio.create_task(ask(LONG.max_tokens - 5 * index)) for index in range(8)]
        # A short answer joins the others and ends: by then they have written something.
        await engine.generate(PROMPT, params=dataclasses.replace(LONG, max_tokens=3))
        await asyncio.to_thread(push)
        pushed.set()
        completions = [completion for client in await asyncio.gather(*clients) for completion in client]
        await engine.close()
        return completions

    return asyncio.run(scene())


MODES = [
    *((kind, "in_place") for kind in KINDS if kind != "tensor"),
    ("tensor", "retract"),
    ("tensor", "abort"),
]
"""Every transport and every mode of an engine's pause, which all transports ask for alike."""


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_an_answer_under_way_names_the_weights_of_all_its_tokens(
    kind: str, mode: str, url: str, make: Make, model_dir: ModelDir
):
    policy = Held(HFCheckpoint().read(model_dir()), "11")
    sync = make(kind, policy, [url])
    sync.pause_mode = mode
    for attempt in range(20):  # on a busy machine all clients may be between two answers when the push pauses
        policy.weight_version = f"1{2 * attempt}"
        sync.push()
        old, new = policy.weight_version, f"1{2 * attempt + 1}"
        policy.weight_version = new
        completions = [completion for completion in answers_during(url, model_dir(), sync.push) if completion.tokens]
        finished = [completion for completion in completions if completion.finish_reason == "length"]
        if mode == "abort":
            interrupted = [completion for completion in completions if completion.finish_reason == "abort"]
            assert all(completion.weight_versions == [old] for completion in interrupted)
            assert all(completion.weight_versions in ([old], [new]) for completion in finished)
        else:
            interrupted = [completion for completion in completions if completion.weight_versions == [old, new]]
            assert all(completion.weight_versions in ([old], [old, new], [new]) for completion in finished)
            assert finished == completions
        if interrupted:
            break
    assert interrupted
    assert answers([url], model_dir())[0].weight_versions == [policy.weight_version]


def misshapen(tensors: NamedTensors) -> NamedTensors:
    """All tensors, one of them cut."""
    cut = "model.layers.1.input_layernorm.weight"
    return [(name, tensor[:3] if name == cut else tensor) for name, tensor in tensors]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_do_not_fit_are_refused_by_name_until_whole_ones_come(
    kind: str, served: str, make: Make, model_dir: ModelDir
):
    whole = list(HFCheckpoint().read(model_dir()))
    policy = Held(misshapen(whole), "21")
    sync = make(kind, policy, [served])
    with pytest.raises(BackendError, match=rf"engine at {served}: .*input_layernorm\.weight has shape \[3\]"):
        sync.push()
    policy.tensors = [named for named in whole if named[0] != "model.norm.weight"]
    with pytest.raises(BackendError, match=r"model\.norm\.weight"):
        sync.push()
    policy.tensors = whole
    sync.push()
    (answer,) = answers([served], model_dir())
    assert answer.tokens == expected(policy, model_dir())
    assert answer.weight_versions == ["21"]


@pytest.mark.sglang
def test_sglang_refuses_a_misshapen_broadcast_and_takes_the_next(sglang: str, make: Make, model_dir: ModelDir):
    whole = list(HFCheckpoint().read(model_dir()))
    policy = Held(misshapen(whole), "31")
    sync = make("distributed", policy, [sglang])
    with pytest.raises(BackendError, match="Failed to update parameter online"):
        sync.push()
    policy.tensors = whole
    sync.push()
    assert answers([sglang], model_dir())[0].tokens == expected(policy, model_dir())


@pushes
def test_a_push_that_is_equal_on_both_sides_passes_the_check(
    kind: str, policy: Policy, url: str, make: Make, model_dir: ModelDir, tmp_path: Path
):
    checked = VerifiedSync(make(kind, policy, [url]), folder=tmp_path, write=partial(write_model, model_dir()))
    checked.push()
    assert answers([url], model_dir())[0].tokens == expected(policy, model_dir())


def test_the_check_finds_other_weights(url: str, make: Make, model_dir: ModelDir, tmp_path: Path):
    tensors = [(name, tensor.clone()) for name, tensor in HFCheckpoint().read(model_dir())]
    sync = make("tensor", Held(tensors, "41"), [url])
    checked = VerifiedSync(sync, folder=tmp_path, write=partial(write_model, model_dir()))
    checked.push()
    dict(tensors)["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-6  # one number, the last bits of it
    with pytest.raises(BackendError, match=r"model\.layers\.1\.mlp\.down_proj\.weight of \d+ tensors differ"):
        checked.check(sync.workers)


class Interrupted(Held):
    """Ctrl-C comes while the weights are read."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_push_leaves_the_engine_going_with_what_it_had(
    kind: str, url: str, make: Make, model_dir: ModelDir
):
    tensors = list(HFCheckpoint().read(model_dir()))
    sync = make(kind, Held(tensors, "71"), [url])
    sync.push()
    sync.policy = Interrupted(tensors, "72")
    with pytest.raises(KeyboardInterrupt):
        sync.push()
    assert answers([url], model_dir())[0].weight_versions == ["71"]
    sync.policy = Held(tensors, "73")
    sync.push()
    assert answers([url], model_dir())[0].weight_versions == ["73"]


def test_a_push_that_fails_where_the_weights_are_leaves_the_policy_usable(policy: Policy, served: str):
    sync = TensorSync(policy, serving.workers([served], timeout_s=5), buffer_bytes=MESSAGE_BYTES)
    nobody = serving.workers(["http://127.0.0.1:9"], timeout_s=5)
    with pytest.raises(BackendError, match=r"engine at http://127\.0\.0\.1:9 cannot be reached"):
        policy.consume_weights(partial(memory._send, workers=nobody, version="1", most_bytes=MESSAGE_BYTES, dtype=None))
    assert len(list(policy.weights())) > 10
    assert sync.push()["bytes"] > 0


ADAPTER = LoraOptions(rank=4, alpha=8.0, targets=("q_proj", "o_proj", "up_proj"))
"""Query without key and value, and up without gate: engines that fuse them must keep the others."""


def adapted(folder: Path, options: LoraOptions = ADAPTER) -> FsdpPolicy:
    return FsdpPolicy(folder, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.02), lora=options))


def test_an_adapter_alone_gives_every_bit_of_merged_weights(url: str, model_dir: ModelDir, tmp_path: Path):
    """Also after whole weights of another policy, which leave nothing of themselves."""
    workers = serving.workers([url], timeout_s=60)
    policy, other = adapted(model_dir()), alone(model_dir())
    trained(other)
    for kind in workers.adapter_transports:
        sync: Any = transport(kind, policy, workers, model_dir(), tmp_path)
        trained(policy)
        sync.push()
        merged = workers.checksums()
        sync.policy = other
        sync.push()
        assert workers.checksums() != merged
        sync.policy, sync.adapters = policy, True
        sent = [sync.push()["bytes"] for _ in range(2)]  # the second one finds the base model
        assert workers.checksums() == merged
        assert sent == [sum(tensor.nbytes for _, tensor in policy.adapter().tensors)] * 2
        (answer,) = answers([url], model_dir())
        assert answer.tokens == expected(policy, model_dir())
        assert answer.weight_versions == [policy.weight_version]
        sync.close()
    fewer = adapted(model_dir(), LoraOptions(2, 8.0, ("down_proj",)))
    trained(fewer)
    TensorSync(fewer, workers, adapters=True).push()
    assert answers([url], model_dir())[0].tokens == expected(fewer, model_dir())


def push_parts(sync: WeightSyncBase, policy: FsdpPolicy, parts: dict[str, torch.Tensor]) -> None:
    """Push these tensors as the policy's adapter, in one message."""
    with sync.paused(sync.workers):
        sync.workers.expect_adapter(policy.adapter())
        sync.workers.load_tensors(list(parts.items()), version="61")


def test_an_adapter_that_does_not_fit_is_refused_in_a_line_and_the_next_one_taken(url: str, model_dir: ModelDir):
    policy, workers = adapted(model_dir()), serving.workers([url], timeout_s=60)
    sync: Any = TensorSync(policy, workers, adapters=True, buffer_bytes=4000)
    sync.push()
    before = answers([url], model_dir())[0].tokens
    parts = dict(policy.adapter().tensors)
    a = "model.layers.0.self_attn.q_proj.lora_A.weight"
    elsewhere = {"model.layers.9.self_attn.q_proj.lora_A.weight": parts[a]}
    for wrong, message in [
        (parts | {a: parts[a][:3]}, r"q_proj\.lora_A\.weight has shape \[3, 64\]"),
        (parts | elsewhere, "is not an adapter of a layer of"),
        ({name: part for name, part in parts.items() if name != a}, "5 of the adapter's 6 layers are complete"),
    ]:
        with pytest.raises(BackendError, match=message) as refusal:
            push_parts(sync, policy, wrong)
        assert "\n" not in str(refusal.value)
        assert answers([url], model_dir())[0].tokens == before
    sync.push()
    assert answers([url], model_dir())[0].weight_versions == [policy.weight_version]


def test_a_killed_server_gets_base_and_adapter_when_it_is_back(model_dir: ModelDir, tmp_path: Path):
    policy = adapted(model_dir())
    for number in range(2):
        trained(policy)
        process = serving.serve(model_dir(), tmp_path, name=f"serve-{number}")
        url, pid = process.start(), process.pid()
        workers = serving.workers([url], timeout_s=60)
        assert pid is not None
        TensorSync(policy, workers, adapters=True).push_to(workers)
        assert answers([url], model_dir())[0].tokens == expected(policy, model_dir())
        os.kill(pid, signal.SIGKILL)
        process.stop()


class Spare:
    """A server to be hurt, which starts without weights."""

    def __init__(self, process: ServerProcess) -> None:
        self.process, self.url = process, process.start()

    def strike(self, number: int) -> None:
        pid = self.process.pid()
        assert pid is not None
        os.kill(pid, number)


@pytest.fixture(scope="module")
def spare(model_dir: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spare]:
    process = serving.serve(model_dir(), tmp_path_factory.mktemp("logs"))
    yield Spare(process)
    process.stop()


def test_a_restarted_engine_gets_the_weights_alone_and_then_with_the_others(
    policy: Policy, served: str, spare: Spare, make: Make, model_dir: ModelDir
):
    syncs = [make(kind, policy, [served]) for kind in KINDS]
    for sync in syncs:
        sync.push()
    late = spare.url
    for sync in syncs:
        sync.push_to(serving.workers([late], timeout_s=60))
        assert answers([late], model_dir())[0].tokens == expected(policy, model_dir())
    trained(policy)
    for sync in syncs:
        sync.workers.set_urls([served, late])
        sync.push()
        first, second = answers([served, late], model_dir())
        assert first.tokens == second.tokens == expected(policy, model_dir())
        assert first.weight_versions == second.weight_versions == [policy.weight_version]


def test_a_push_to_an_engine_that_hangs_or_died_ends_in_time_and_the_others_go_on(
    served: str, spare: Spare, make: Make, model_dir: ModelDir
):
    doomed = spare.url
    policy = Held(HFCheckpoint().read(model_dir()), "51")
    syncs = {kind: make(kind, policy, [served, doomed], timeout_s=1) for kind in KINDS}
    broadcasting = make("distributed", policy, [doomed], timeout_s=5)
    for sync in (*syncs.values(), broadcasting):
        sync.push()
    policy.weight_version = "52"

    def push_in_vain(words: str) -> None:
        for sync in syncs.values():
            with pytest.raises(BackendError, match=rf"engine at {doomed} {words}"):
                sync.push()

    spare.strike(signal.SIGSTOP)
    push_in_vain("did not respond within 1 s")
    die_in_a_broadcast(spare, broadcasting)
    push_in_vain("(cannot be reached|died during)")
    syncs["tensor"].workers.set_urls([served])
    syncs["tensor"].push()
    assert answers([served], model_dir())[0].weight_versions == ["52"]


def die_in_a_broadcast(stopped: Spare, sync: WeightSyncBase) -> None:
    """Kill the engine that one waits for in the middle: the broadcast ends."""
    group = distributed._GROUPS[sync._key]  # type: ignore[attr-defined]
    large = torch.zeros(64 * 2**20, dtype=torch.uint8)  # more than sockets hold: it stays under way
    work = start_broadcast(group.backend, large, timedelta(seconds=3000))  # more than a test may take
    group.pending = [work]
    time.sleep(0.3)
    assert not work.is_completed()
    stopped.strike(signal.SIGKILL)
    with pytest.raises(BackendError):
        distributed._finish(work, distributed._in_background(lambda: None), 3000.0)
