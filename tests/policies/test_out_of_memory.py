"""Packs that do not fit into memory are divided: no call fails, and loss and gradient stay the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_limit import MemoryLimit
from policy_cases import Clipped, Failing, flat_log_probs, new_policy, random_rows, rows_with_returns
from torch import Tensor

from slimectl.algorithms.packing import BatchingOptions
from slimectl.algorithms.value_loss import ValueLoss
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import OutOfMemoryError
from slimectl.planner.devices import is_out_of_memory
from slimectl.policies.fsdp import build
from slimectl.policies.fsdp.policy import FsdpCritic, FsdpPolicy
from slimectl.policies.lora import LoraOptions
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.out_of_memory import unless_out_of_memory
from slimectl.policies.recompute import Recompute
from slimectl.types import TrainingSample

ModelDir = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(model_dir: ModelDir) -> Path:
    return model_dir("llama_untied")


def gradient(trainer: Any) -> Tensor:
    return torch.cat([part.flatten() for part in trainer.masters.gradients()])


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest entry."""
    return float((found - expected).abs().max() / expected.abs().max())


def measured(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result of work without a limit, the bytes that it needs for a while, and those that it leaves."""
    with MemoryLimit() as memory:
        result = work()
    return result, memory.peak - memory.live, memory.live


KINDS: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {},
    "lora": {"lora": LoraOptions(4, 8.0, ("q_proj", "up_proj"))},
    "micro-batches": {"batching": BatchingOptions(micro_batch_size=8)},
    "critic": {},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_divided_pack_gives_the_same_gradient(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    if kind == "padded":
        monkeypatch.setattr(build, "_unsupported", lambda hf: "is padded for a test")
    trainer = FsdpCritic if kind == "critic" else FsdpPolicy
    rows, loss = (rows_with_returns(), ValueLoss()) if kind == "critic" else (random_rows(), Clipped())
    exact = kind != "bfloat16"
    if not exact:  # the gradients of its copies need much of the memory
        rows = random_rows(groups=8, answers=8)

    def new(**options: Any) -> Any:
        return trainer(folder, HFCheckpoint(), TrainerOptions(**(KINDS[kind] | options)))

    plain = new()
    expected, transient, kept = measured(lambda: plain.forward_backward(rows, loss))
    in_backward = set[bool]()
    for share in (0.99, 0.75) if exact else (0.99, 0.8):
        limited = new()
        with MemoryLimit(kept + share * transient) as memory:
            found = limited.forward_backward(rows, loss)
        assert memory.faults
        in_backward |= set(memory.in_backward)
        assert found == pytest.approx(expected, rel=2e-6 if exact else 2e-2, abs=1e-7)
        assert difference(gradient(limited), gradient(plain)) < (1e-6 if exact else 2e-2)
        # A run with these packs from the beginning has the same bits.
        fit = limited.fitter.planning
        smaller = new(max_tokens_per_pack=fit.max_tokens_per_pack, batching=replace(fit.batching, padded=False))
        assert smaller.forward_backward(rows, loss) == found
        assert torch.equal(gradient(smaller), gradient(limited))
    assert True in in_backward or kind in ("lora", "bfloat16")


def test_a_failed_backward_pass_leaves_nothing_in_memory():
    """torch keeps tasks of a failed pass, with their tensors, unless older ones run."""

    def work() -> None:
        first = torch.ones(1000, requires_grad=True)
        sum((first.exp() * number).exp().sum() for number in range(9)).backward()

    _, most, _ = measured(work)
    with MemoryLimit(most - 1) as memory:
        assert unless_out_of_memory(work) is None
    assert memory.in_backward == [True]
    assert memory.live == 0


def test_earlier_calls_of_a_step_are_computed_again(folder: Path):
    first, second = random_rows(groups=1), random_rows(groups=3, seed=1)
    plain, limited = new_policy(folder), new_policy(folder)
    plain.forward_backward(first, Clipped())
    _, transient, kept = measured(lambda: plain.forward_backward(second, Clipped()))
    limited.forward_backward(first, Clipped())
    with MemoryLimit(kept + 0.99 * transient) as memory:
        limited.forward_backward(second, Clipped())
    assert memory.faults
    assert difference(gradient(limited), gradient(plain)) < 1e-6
    assert plain.optim_step() == pytest.approx(limited.optim_step(), rel=1e-6)


def test_passes_without_gradients_are_divided(folder: Path):
    rows = random_rows(groups=4)
    policy = new_policy(folder)
    expected, transient, _ = measured(lambda: flat_log_probs(policy, rows))
    with MemoryLimit(0.5 * transient) as memory:
        assert torch.allclose(flat_log_probs(policy, rows), expected, atol=1e-6)
    assert memory.in_backward == [False] * len(memory.faults)
    assert policy.fitter.planning.max_tokens_per_pack < TrainerOptions().max_tokens_per_pack


def long_row(tokens: int, **fields: Any) -> TrainingSample:
    count = tokens // 2
    return TrainingSample(
        [7 * i % 256 for i in range(tokens)], count, [0.02] * count, [1.0] * count, [-5.0] * count, **fields
    )


def test_one_long_sample_is_recomputed(folder: Path, caplog: pytest.LogCaptureFixture):
    rows = [long_row(60, index=31)]
    plain = new_policy(folder)
    _, transient, kept = measured(lambda: plain.forward_backward(rows, Clipped()))
    limited = new_policy(folder)
    with MemoryLimit(kept + 0.9 * transient):
        limited.forward_backward(rows, Clipped())
    assert difference(gradient(limited), gradient(plain)) < 1e-6
    [message] = caplog.messages
    assert message.startswith("out of memory in training sample 31 of 59 tokens alone")
    assert message.endswith("set train.gradient_checkpointing = true")


def test_a_sample_that_never_fits_is_left_out_unless_there_are_many(folder: Path, caplog: pytest.LogCaptureFixture):
    short, long = random_rows(), long_row(240, index=31)
    options = {"recompute": Recompute("full")}
    plain = new_policy(folder, **options)
    expected, _, kept = measured(lambda: plain.forward_backward(short, Clipped()))
    _, transient, _ = measured(lambda: new_policy(folder, **options).forward_backward([long], Clipped()))
    limited = new_policy(folder, **options)
    with MemoryLimit(kept + 0.6 * transient):
        found = limited.forward_backward([*short, long], Clipped())
    assert found == pytest.approx(expected | {"samples_left_out": 1.0}, rel=2e-6)
    assert difference(gradient(limited), gradient(plain)) < 1e-6
    assert "out of memory in training sample 31 of 239 tokens alone" in caplog.text
    limited.optim_step()
    with MemoryLimit(kept + 0.6 * transient):
        with pytest.raises(OutOfMemoryError, match="training 2 of the 11 samples of a step alone"):
            limited.forward_backward([*short, long, long_row(240)], Clipped())
        with pytest.raises(OutOfMemoryError, match="training 1 of the 1 samples of a step alone"):
            limited.forward_backward([long], Clipped())


def test_a_pass_that_needs_one_long_sample_raises(folder: Path):
    policy, row = new_policy(folder), long_row(240, index=5)
    _, transient, _ = measured(lambda: policy.log_probs([row]))
    with (
        MemoryLimit(0.5 * transient),
        pytest.raises(OutOfMemoryError, match="a scoring pass over sample 5 of 239 tokens alone"),
    ):
        policy.log_probs([row])


def test_an_update_that_does_not_fit_names_what_helps(folder: Path):
    policy = new_policy(folder, optimizer=OptimizerOptions(lr=1e-3, state_dtype="bfloat16"))
    policy.forward_backward(random_rows(), Clipped())
    with MemoryLimit(1000), pytest.raises(OutOfMemoryError, match=r"in the update of the optimizer\. Set train\.opti"):
        policy.optim_step()


def test_other_errors_are_not_taken_for_a_lack_of_memory(folder: Path):
    policy = new_policy(folder)
    with pytest.raises(ZeroDivisionError):
        policy.forward_backward(random_rows(), Failing())
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_checkpoint_keeps_the_size_of_packs(folder: Path, tmp_path: Path):
    rows, policy = random_rows(), new_policy(folder)
    _, transient, kept = measured(lambda: new_policy(folder).forward_backward(rows, Clipped()))
    with MemoryLimit(kept + 0.4 * transient):
        policy.forward_backward(rows, Clipped())
    policy.optim_step()
    policy.save(tmp_path)
    resumed, changed = new_policy(folder), new_policy(folder, max_tokens_per_pack=512)
    for other in (resumed, changed):
        other.load(tmp_path)
    assert resumed.forward_backward(rows, Clipped()) == policy.forward_backward(rows, Clipped())
    assert resumed.fitter.planning == policy.fitter.planning
    assert torch.equal(gradient(resumed), gradient(policy))
    assert changed.fitter.planning.max_tokens_per_pack == 512


@pytest.mark.parametrize("number", [3, 11])
def test_random_attacks_of_the_campaign(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "reliability"))
    import out_of_memory

    draw, faults = random.Random(f"1:{number}"), Counter[str]()
    _, trial = out_of_memory.drawn_trial(draw, tmp_path)
    assert out_of_memory.attack(trial, 0.9, faults) == ""
    assert faults["attacks that ran out of memory"]
