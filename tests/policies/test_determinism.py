"""train.deterministic: which kernels compute, in which processes, and what is refused."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from workshop import Workshop

from slimectl.errors import SettingsError
from slimectl.policies.determinism import check_model, deterministic_kernels, prepare_gpu
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve

LOSS = """
import json, os, torch

def choices():
    backends = torch.backends
    return [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            backends.cudnn.deterministic, backends.cudnn.benchmark, backends.cuda.cudnn_sdp_enabled()]

def note(where):
    with open("choices.jsonl", "a") as file:
        file.write(json.dumps([where, os.getpid(), choices()]) + chr(10))

def loss(args, batch, log_probs, sum_of_sample_mean):
    note("loss")
    return -sum_of_sample_mean(batch.advantages_T * log_probs), {}

def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    note("driver")
    return False
"""
PLAIN, DETERMINISTIC = [False, False, False, False, True], [True, False, True, False, False]


def choices_of(workshop: Workshop, name: str, *assignments: str) -> list[tuple[str, int, list[bool]]]:
    (workshop.folder / "own.py").write_text(LOSS)
    options = ("train.custom_loss_function_path=own.py:loss", "track.custom_rollout_log_function_path=own.py:log",
               "run.num_rollout=2", "train.num_steps_per_rollout=2", *assignments)  # fmt: skip
    workshop.slimectl("run", "--name", name, *[word for option in options for word in ("-s", option)])
    lines = (workshop.folder / "choices.jsonl").read_text().splitlines()
    (workshop.folder / "choices.jsonl").unlink()
    return [tuple(json.loads(line)) for line in lines]


@pytest.mark.parametrize(("backend", "ranks"), [("fsdp", 1), ("fsdp", 2), ("megatron", 1)])
def test_only_the_trainer_computes_with_deterministic_kernels_and_a_cpu_gives_the_same_run(
    backend: str, ranks: int, workshop: Workshop
):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    where = (f"train.backend={backend}", f"cluster.actor_num_gpus_per_node={ranks}")
    plain = choices_of(workshop, "plain", *where)
    assert all(choices == PLAIN for _, _, choices in plain)
    found = choices_of(workshop, "deterministic", *where, "train.deterministic=true")
    assert {name: choices for name, _, choices in found} == {"loss": DETERMINISTIC, "driver": PLAIN}
    assert len({pid for name, pid, _ in found if name == "loss"}) == ranks
    assert workshop.metrics("deterministic") == workshop.metrics("plain")


def test_choices_of_the_process_are_restored_after_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    def fail() -> None:
        with deterministic_kernels():
            with deterministic_kernels():
                pass
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.backends.cudnn.benchmark
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()


def test_libraries_of_a_gpu_are_told_before_it_is_used(monkeypatch: pytest.MonkeyPatch):
    names = (
        "CUBLAS_WORKSPACE_CONFIG",
        "FLASH_ATTENTION_DETERMINISTIC",
        "NCCL_ALGO",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    )
    for name in names:
        monkeypatch.setenv(name, "")  # which is undone at the end of the test
        monkeypatch.delenv(name)
    with pytest.raises(SettingsError, match=r"this process has already used the GPU.*CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        prepare_gpu(used=True)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    prepare_gpu(used=False)
    assert [os.environ[name] for name in names] == [":4096:8", "1", "Tree", "0"]
    prepare_gpu(used=True)


def settings(*assignments: str) -> Any:
    return resolve([from_assignments(list(assignments))]).settings


def test_megatrons_switch_is_the_same_one():
    assert settings("train.backend=megatron", "megatron.args={deterministic_mode = true}").deterministic
    assert not settings("train.backend=megatron").deterministic
    with pytest.raises(SettingsError, match=r"contradicts megatron\.args\.deterministic_mode = false\. Drop one"):
        settings("train.backend=megatron", "megatron.args={deterministic_mode = false}", "train.deterministic=true")


HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS, DENSE = {"num_local_experts": 8}, {"layer_types": None}


@pytest.mark.parametrize(
    ("config", "device", "backend", "words"),
    [
        (HYBRID, "cuda", "megatron", r"linear attention sums with torch\.cumsum.*Set train\.deterministic = false"),
        (EXPERTS, "cuda", "fsdp", r"counts the tokens of experts with torch\.histc.*Set train\.backend = .megatron"),
        (EXPERTS, "cuda", "megatron", ""),
        (DENSE, "cuda", "fsdp", ""),
        (HYBRID, "cpu", "fsdp", ""),
        (EXPERTS, "cpu", "fsdp", ""),
    ],
)
def test_a_model_without_deterministic_kernels_is_refused_on_a_gpu(
    config: dict[str, Any], device: str, backend: str, words: str
):
    with pytest.raises(SettingsError, match=words) if words else nullcontext():
        check_model(config, device=device, backend=backend)
