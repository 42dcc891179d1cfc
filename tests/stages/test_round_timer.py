"""Memory and arithmetic rate of a round, by hand."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slimectl.algorithms.packing import plan_batches
from slimectl.architectures.config import read_config
from slimectl.data.metrics_catalogue import known
from slimectl.planner.devices import DeviceMemory, ProcessMemory, measured_peak, peak_flops, process_memory
from slimectl.planner.flops import ImageFlops, ModelFlops, SequenceFlops, flops_figures, model_flops
from slimectl.planner.plan import model_of
from slimectl.runtime import builders
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.stages.round_timer import ArithmeticRate, RoundTimer
from slimectl.types import TrainingSample

GIB = 1024**3


class Ranks:
    """A model on two GPUs that says what memory it has, moment by moment."""

    def __init__(self, *moments: ProcessMemory) -> None:
        self.moments = list(moments)

    def on_ranks(self, function: Callable[..., Any], *arguments: Any) -> list[ProcessMemory]:
        now = self.moments.pop(0)
        assert now.device is not None
        return [now, replace(now, rss=now.rss // 2, device=replace(now.device, index=1))]


def memory(allocated: int, peak: int, rss: int = 2) -> ProcessMemory:
    device = DeviceMemory(0, allocated * GIB, 2 * allocated * GIB, peak * GIB, 2 * peak * GIB, 80 * GIB)
    return ProcessMemory(rss * GIB, 3 * rss * GIB, device)


def test_the_memory_of_a_phase_is_that_of_its_start_and_of_its_end():
    timer = RoundTimer(log_memory=True)
    # Two steps of a round: before and after each.
    model = Ranks(memory(1, 30), memory(2, 10), memory(3, 3), memory(4, 20, rss=5))
    for _ in range(2):
        with timer.time("perf/actor_train_time", of=model):
            pass
    taken = timer.take()
    assert all(map(known, taken))
    phase = "memory/train_step"
    assert taken[f"{phase}/start/onload/allocated/0"] == taken[f"{phase}/start/offload/max_allocated/1"] == 1.0
    assert taken[f"{phase}/end/onload/reserved/1"] == 8.0
    assert taken[f"{phase}/end/offload/max_reserved/0"] == 40.0
    assert taken[f"{phase}/end/onload/max_allocated_frac/0"] == 20 / 80
    assert taken["memory/cpu/train_step/start/rss"] == 2.0
    assert taken["memory/cpu/train_step/end/vms"] == 15.0
    assert (taken["perf/gpu_memory_allocated_gb"], taken["perf/gpu_memory_reserved_gb"]) == (30.0, 60.0)
    assert taken["perf/cpu_memory_gb"] == 5.0


def test_the_memory_of_this_process_is_what_it_holds():
    before = process_memory()
    # Pages of its own: the allocator may have as much from tests before.
    with mmap.mmap(-1, 256 << 20) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        # Other threads of this process may free memory meanwhile.
        assert process_memory().rss - before.rss >= 128 << 20
    assert before.vms >= before.rss


def row(prompt: list[int], response: list[int]) -> TrainingSample:
    return TrainingSample(prompt + response, len(response), [1.0] * len(response))


@pytest.mark.parametrize(("share", "tokens"), [(None, 19), (False, 19), (True, 19 - 4)])
def test_a_rate_is_flops_over_time_and_ranks(share: bool | None, tokens: int):
    clock = iter([0.0, 2.0])
    flops = ModelFlops(forward=SequenceFlops(1e12, 0.0), training=SequenceFlops(3e12, 0.0))
    pack = None if share is None else partial(plan_batches, max_tokens=100, share=share)
    timer = RoundTimer(clock.__next__, rate=ArithmeticRate(flops, 2, peak=1e14), pack=pack)
    with timer.time("perf/actor_train_time"):
        pass
    timer.count_training([row([1] * 4, [1] * 4), row([1] * 4, [2] * 4), row([3] * 4, [3] * 2)])
    taken = timer.take()
    assert taken.get("perf/shared_tokens_ratio") == (None if share is None else (19 - tokens) / 19)
    assert taken["perf/actor_train_tflops"] == 3 * tokens / 2.0 / 2
    assert taken["perf/mfu"] == pytest.approx(3 * tokens / 2.0 / 2 / 100)
    assert timer.take() == {}


@pytest.mark.parametrize(("share", "images"), [(False, 3), (True, 2)])
def test_images_that_a_pass_computes_count_by_their_tokens(share: bool, images: int):
    clock = iter([0.0, 1.0, 1.0, 2.0])
    nothing = SequenceFlops(0.0, 0.0)
    tower = ImageFlops(9, forward=lambda tokens: tokens * 1e12, training=lambda tokens: tokens * 3e12)
    rate = ArithmeticRate(ModelFlops(nothing, nothing), images=tower)
    timer = RoundTimer(clock.__next__, rate=rate, pack=partial(plan_batches, max_tokens=100, share=share))
    rows = [row([1, 9, 9, 2], [1] * 4), row([1, 9, 9, 2], [2] * 4), row([3, 9, 9, 2], [9] * 3)]
    for each, name in zip(rows, "aab", strict=True):
        each.images = [name]
    for name, count in (("actor_train", timer.count_training), ("log_probs", timer.count_log_probs)):
        with timer.time(f"perf/{name}_time"):
            pass
        count(rows)
    taken = timer.take()
    assert (taken["perf/actor_train_tflops"], taken["perf/log_probs_tflops"]) == (3 * 2 * images, 2 * images)


def test_flops_of_a_sequence_are_those_that_the_planner_shows(model_dir: Callable[..., Path]):
    model = model_of(read_config(model_dir("qwen3"))).all[0]
    figures = flops_figures([model], seq_len=100, batch=1, world=1, recomputes=True, tflops=None, mfu=0.4)
    step, recomputed = (figure.value for figure in figures[1:])
    flops = model_flops(model)
    assert flops.training(100) == pytest.approx(step)
    assert flops.forward(100) == pytest.approx(recomputed - step)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H200", 989.4), ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 311.9), ("NVIDIA GeForce RTX 4090", 165.2), ("Quadro P4000", None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_the_words_of_its_name(name: str, tflops: float | None):
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_a_measured_peak_is_one_that_products_reach():
    assert measured_peak("cpu", "float32") > 1e9


def test_gpus_of_all_engines_are_counted():
    def gpus(*assignments: str) -> int:
        return resolve([from_assignments(list(assignments))]).settings.rollout_gpus

    sglang = "engine.backend=sglang"
    assert gpus() == 1
    assert gpus(sglang, "engine.num_engines=2", "cluster.rollout_num_gpus_per_engine=4") == 8
    assert gpus(sglang, "cluster.rollout_num_gpus=4", "cluster.rollout_num_gpus_per_engine=2") == 4
    assert gpus("engine.url=['http://a:1','http://b:1']") == 2


def test_a_model_of_an_unknown_family_has_no_rate(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    assert builders.round_timer(resolve([]).settings, tmp_path, Ranks()).rate is None  # type: ignore[arg-type]
