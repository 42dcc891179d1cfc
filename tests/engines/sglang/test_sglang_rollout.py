"""A real SGLang server, asked as a rollout asks: the answers are the embedded engine's."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import serving
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from workshop import set_up

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.http.client import HttpEngine
from slimectl.engines.sglang.api import SglangApi
from slimectl.engines.sglang.weight_client import SglangWorkers
from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions
from slimectl.engines.supervisor.server_process import ServerProcess
from slimectl.errors import BackendError
from slimectl.settings.rollout import RolloutSettings
from slimectl.stages.generation import GroupGenerator
from slimectl.stages.prompt_groups import PromptSource
from slimectl.stages.rollout import rollout
from slimectl.types import Completion, Prompt, Sample, SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPT = list(b"once upon a time")
ModelDir = Callable[..., Path]


class Served:
    """One server under a fleet: restarted when it dies, with version 5 of the same weights."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder = folder
        self.server: ServerProcess = serving.sglang(folder, logs, preloaded=True)
        self.engine: HttpEngine = serving.client([], folder)
        self.fleet = ServerPool(lambda _: self.server, 1, watch=WatchOptions(interval_s=600.0))
        self.fleet.announce, self.fleet.failed, self.fleet.restore = self.engine.set_urls, self.engine.fail, self.push
        self.engine.troubled = self.fleet.look
        self.fleet.start()

    def push(self, url: str) -> None:
        workers = SglangWorkers([url], keys=serving.KEYS)
        workers.begin(mode="in_place")
        workers.load_tensors(list(HFCheckpoint().read(self.folder)), version="5")
        workers.end()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_dir: ModelDir) -> Iterator[Served]:
    made = Served(model_dir("qwen3"), tmp_path_factory.mktemp("logs"))
    yield made
    asyncio.run(made.engine.close())
    made.fleet.close()


def samples(engine: Any, folder: Path, **settings: Any) -> list[Sample]:
    prompts = [Prompt(text=text, index=i) for i, text in enumerate(["1+1=", "a long, long time ago", "é", "x = [1, 2"])]
    chosen = RolloutSettings(n_samples_per_prompt=2, max_response_len=24, apply_chat_template=False, **settings)
    generator = GroupGenerator(engine, AutoTokenizer.from_pretrained(folder), chosen)
    return list(rollout(PromptSource(prompts, generator)))


def answered(engine: Any, *asked: SamplingParams) -> list[Completion]:
    async def gathered() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(PROMPT, params=params) for params in asked))

    return asyncio.run(gathered())


def shared_memory(*pids: int) -> set[Path]:
    """The files of shared memory that processes have open."""
    lines = [line.split() for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(line[5]) for line in lines if line[-1].startswith("/dev/shm/")}


def test_nothing_is_sampled_before_the_first_push(served: Served):
    stale = serving.client(served.fleet.urls, served.folder, connect_timeout_s=1.0)
    with pytest.raises(BackendError, match="the server has no weights yet"):
        answered(stale, SamplingParams(max_tokens=2))
    asyncio.run(stale.close())
    served.push(served.fleet.urls[0])
    assert answered(served.engine, SamplingParams(max_tokens=2))[0].weight_versions == ["5"]


def test_a_greedy_rollout_is_that_of_the_embedded_engine(served: Served):
    folder = served.folder
    embedded = EmbeddedEngine(AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    embedded.load_weights(HFCheckpoint().read(folder), version="5")
    mine = samples(embedded, folder, top_k=1)
    theirs = samples(served.engine, folder, top_k=1)
    assert [sample.tokens for sample in theirs] == [sample.tokens for sample in mine]
    assert [sample.response for sample in theirs] == [sample.response for sample in mine]
    assert [sample.status for sample in theirs] == [sample.status for sample in mine]
    assert [sample.weight_versions for sample in theirs] == [["5"]] * 8
    for a, b in zip(theirs, mine, strict=True):
        assert a.rollout_log_probs == pytest.approx(b.rollout_log_probs, abs=1e-4)


def test_a_sampled_rollout_can_be_drawn_again_and_its_log_probs_are_the_models(served: Served):
    once, again = (samples(served.engine, served.folder, temperature=0.8, top_p=0.9, min_p=0.01) for _ in range(2))
    assert [sample.tokens for sample in once] == [sample.tokens for sample in again]
    assert len({tuple(sample.tokens) for sample in once}) == 8
    model = AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32)
    for sample in once:
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, sample.prompt_length - 1 : -1]
        expected = (logits / 0.8).log_softmax(-1)
        expected = expected[torch.arange(sample.response_length), sample.tokens[sample.prompt_length :]]
        assert sample.rollout_log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_draws_follow_the_distribution_that_min_p_leaves(served: Served):
    """First tokens of 600 seeds: none below the bound, the likeliest as often as its share says."""
    params = [SamplingParams(max_tokens=1, min_p=0.3, seed=seed) for seed in range(600)]
    drawn = [answer.tokens[0] for answer in answered(served.engine, *params)]
    model = AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32)
    with torch.no_grad():
        probs = model(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    kept = torch.where(probs >= 0.3 * probs.max(), probs, 0.0)
    kept /= kept.sum()
    assert set(drawn) <= set(kept.nonzero().flatten().tolist())
    best = int(kept.argmax())
    share = float(kept[best])
    assert drawn.count(best) / 600 == pytest.approx(share, abs=4 * (share * (1 - share) / 600) ** 0.5)


def test_the_prefix_of_siblings_is_computed_once(served: Served):
    prompt = [*b"Zebras nobody has asked about"]

    async def after_another() -> list[int]:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        return [(await served.engine.generate(prompt, params=params)).cached_tokens for _ in range(2)]

    assert asyncio.run(after_another()) == [0, len(prompt) - 1]


def test_kill_9_in_mid_answer_costs_nothing_but_time(served: Served, monkeypatch: pytest.MonkeyPatch):
    begun, add_event = threading.Event(), SglangApi.add_event

    def add_and_tell(*arguments: Any) -> None:
        add_event(*arguments)
        begun.set()

    asked = [SamplingParams(max_tokens=200, ignore_eos=True, seed=seed) for seed in range(4)]
    undisturbed = answered(served.engine, *asked)

    async def killed() -> list[Completion]:
        monkeypatch.setattr(SglangApi, "add_event", add_and_tell)
        under_way = asyncio.gather(*(served.engine.generate(PROMPT, params=params) for params in asked))
        await asyncio.to_thread(begun.wait)  # for the first of 800 tokens
        pid = served.server.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return await under_way

    disturbed = asyncio.run(killed())
    assert [answer.tokens for answer in disturbed] == [answer.tokens for answer in undisturbed]
    assert {tuple(answer.weight_versions) for answer in disturbed} == {("5",)}
    assert served.fleet.restarts == 1


def test_an_evaluation_through_a_running_server_is_that_of_the_embedded_engine(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLIMECTL_ENGINE_ADMIN_API_KEY", serving.KEYS.admin_api_key)
    workshop = set_up(tmp_path, served.folder)
    both = []
    for engine in (["--engine", "sglang", "--engine-url", served.fleet.urls[0]], []):
        data = ["--data", "small=prompts.jsonl", "--temperature", "0", "--out", "e.jsonl"]
        workshop.slimectl("eval", "-c", "slimectl.toml", *data, *engine, timeout_s=240)
        both.append([json.loads(line)["tokens"] for line in (tmp_path / "e.jsonl").read_text().splitlines()])
    assert len(both[0]) == 8
    assert both[0] == both[1]


def test_a_server_without_enough_memory_says_so_in_one_line(tmp_path: Path, model_dir: ModelDir):
    starved, reasons = tmp_path / "python", []
    for limit in (1_000_000, 1_050_000, 950_000):  # KiB: where it hits an import, the library may name another error
        starved.write_text(
            f'#!/bin/sh\ncase "$*" in *--model*) ulimit -v {limit};; esac\nexec "{serving.python_of("sglang")}" "$@"\n'
        )
        starved.chmod(0o755)
        with pytest.raises(BackendError) as died:
            serving.sglang(model_dir(), tmp_path, python=str(starved)).start()
        assert "sglang died while starting" in str(died.value)
        assert "\n" not in str(died.value)
        reasons.append(str(died.value).partition("; its log")[0])
        if "emory" in reasons[-1]:
            return
    raise AssertionError(reasons)


def test_a_rollout_starts_two_ranks_which_answer_as_one_and_leave_nothing(tmp_path: Path, model_dir: ModelDir):
    workshop = set_up(tmp_path, model_dir())
    given = ["--model", str(workshop.model), "--engine", "sglang", "-s", "cluster.rollout_num_gpus_per_engine=2"]
    shape = ["-n", "4", "--max-response-len", "8", "-s", "rollout.top_k=1"]
    with (tmp_path / "words.txt").open("wb") as log:
        arguments = ["rollout", "--data", "prompts.jsonl", *given, *shape]
        process = workshop.start(*arguments, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # the rollout cannot end before all but this is read
    first = process.stdout.readline()
    assert first, (tmp_path / "words.txt").read_text()
    group = psutil.Process(process.pid).children(recursive=True)
    memory = shared_memory(*(member.pid for member in group))
    assert memory
    answers = [json.loads(line) for line in [first, *process.stdout]]
    assert process.wait(timeout=240) == 0
    assert [sample["index"] for sample in answers] == list(range(32))
    assert all(len(sample["rollout_log_probs"]) == sample["response_length"] for sample in answers)
    reference = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    for sample in answers[::4]:
        prompt = sample["tokens"][: len(sample["tokens"]) - sample["response_length"]]
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert sample["tokens"] == expected[0].tolist()
    assert not psutil.wait_procs(group, timeout=300)[1]
    assert not [segment for segment in memory if segment.exists()]
