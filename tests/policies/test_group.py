"""Two ranks equal one; failures and deaths are reported; nothing stays behind."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import forkserver
import pytest
import torch
from policy_cases import Clipped, Failing, WeightedNegativeLogProb, new_policy, random_rows

from slimectl.errors import BackendError, CheckpointError
from slimectl.executors.local import LocalExecutor
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.rank_group import DistributedPolicy
from slimectl.protocols import NamedTensors, RankConsumers
from slimectl.runtime.profiling import RoundProfiler

pytestmark = pytest.mark.slow

ModelDir = Callable[..., Path]
ROUNDED = OptimizerOptions(lr=1e-3, state_dtype="bfloat16")
"""Moments in bfloat16, whose noise is that of one rank."""
ROUNDING = 3e-6
"""Relative; two orders of summing float32 gradients."""


@pytest.fixture(scope="module")
def two(model_dir: ModelDir) -> Iterator[DistributedPolicy]:
    group = DistributedPolicy(
        LocalExecutor(), partial(new_policy, model_dir("qwen3_moe"), max_tokens_per_pack=60), ranks=2
    )
    yield group
    group.close()


def test_two_ranks_equal_one(two: DistributedPolicy, model_dir: ModelDir, tmp_path: Path):
    one = new_policy(model_dir("qwen3_moe"), optimizer=ROUNDED)
    for seed in range(2):
        rows = random_rows(groups=4, seed=seed)
        for found, expected in zip(two.log_probs(rows), one.log_probs(rows), strict=True):
            assert found == pytest.approx(expected, abs=2e-5)
        assert two.forward_backward(rows, Clipped()) == pytest.approx(one.forward_backward(rows, Clipped()), rel=1e-5)
        assert two.optim_step() == pytest.approx(one.optim_step(), rel=1e-5)
    assert two.weight_version == one.weight_version == "2"
    for (name, tensor), (expected_name, expected) in zip(two.weights(), one.weights(), strict=True):
        assert name == expected_name
        torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=1e-4)
    two.save(tmp_path)
    one.load(tmp_path)
    rows = random_rows(seed=5)
    assert one.forward_backward(rows, Clipped()) == pytest.approx(two.forward_backward(rows, Clipped()), rel=1e-5)
    assert one.optim_step() == pytest.approx(two.optim_step(), rel=1e-5)


def first_rank_or(fallback: int) -> tuple[int, int]:
    rank = torch.distributed.get_rank()
    if fallback < 0 and rank == 1:
        raise ValueError("no fallback")
    return rank or fallback, os.getpid()


def test_a_function_is_called_on_every_rank_and_an_error_of_one_is_raised(two: DistributedPolicy):
    (first, one), (second, other) = two.on_ranks(first_rank_or, 7)
    assert (first, second) == (7, 1)
    assert len({one, other, os.getpid()}) == 3
    with pytest.raises(ValueError, match="no fallback"):
        two.on_ranks(first_rank_or, -1)
    assert [rank for rank, _ in two.on_ranks(first_rank_or, 3)] == [3, 1]


def test_every_rank_writes_a_profile_of_its_own(two: DistributedPolicy, tmp_path: Path):
    profiler = RoundProfiler((2, 3), tmp_path, policy=two)
    for number in range(1, 5):
        profiler.before_round(number)
        two.log_probs(random_rows(groups=1))
        profiler.after_round(number)
    names = [f"rounds_2-3{rank}.json.gz" for rank in ("", ".policy-rank-0", ".policy-rank-1")]
    assert sorted(file.name for file in (tmp_path / "profile").iterdir()) == sorted(names)
    events = json.loads(gzip.decompress((tmp_path / "profile" / names[1]).read_bytes()))["traceEvents"]
    assert any(event["name"] == "aten::embedding" for event in events)


def test_what_one_rank_saved_two_load(two: DistributedPolicy, model_dir: ModelDir, tmp_path: Path):
    one = new_policy(model_dir("qwen3_moe"), optimizer=ROUNDED)
    one.forward_backward(random_rows(), Clipped())
    one.optim_step()
    one.save(tmp_path)
    two.log_probs(random_rows())  # a pass without gradients leaves nothing of the weights before
    two.load(tmp_path)
    assert two.weight_version == "1"
    for found, expected in zip(two.log_probs(random_rows()), one.log_probs(random_rows()), strict=True):
        assert found == pytest.approx(expected, abs=2e-5)
    for (name, tensor), (expected_name, expected) in zip(two.weights(), one.weights(), strict=True):
        assert name == expected_name
        assert torch.equal(tensor, expected)
    rows = random_rows(seed=3)
    assert two.forward_backward(rows, Clipped()) == pytest.approx(one.forward_backward(rows, Clipped()), rel=ROUNDING)
    assert two.optim_step() == pytest.approx(one.optim_step(), rel=ROUNDING)


def test_a_rank_without_rows_takes_part(two: DistributedPolicy, model_dir: ModelDir, tmp_path: Path):
    two.save(tmp_path)
    one = new_policy(model_dir("qwen3_moe"), optimizer=ROUNDED)
    one.load(tmp_path)
    rows = random_rows()[:1]
    loss = WeightedNegativeLogProb(needs_entropy=True)
    assert two.forward_backward(rows, loss) == pytest.approx(one.forward_backward(rows, loss), rel=ROUNDING)
    assert two.optim_step() == pytest.approx(one.optim_step(), rel=ROUNDING)
    assert two.forward_backward([], loss) == {"loss": 0.0}
    assert two.optim_step()["grad_norm"] == 0.0


def test_leaving_the_weights_early_leaves_the_ranks_usable(two: DistributedPolicy):
    stream = two.weights()
    next(stream)
    with pytest.raises(RuntimeError, match="weights are still being read"):
        two.optim_step()
    stream.close()
    assert len(two.log_probs(random_rows())) == 9


def test_weights_are_handed_over_on_rank_0_and_what_is_made_of_them_comes_back(two: DistributedPolicy):
    names = [name for name, _ in two.weights()]
    assert two.consume_weights(names_and_rank) == (names, 0)
    assert two.consume_weights(first_name) == names[0]
    assert len(two.log_probs(random_rows())) == 9


def test_weights_are_handed_over_on_the_ranks_that_have_a_consumer(two: DistributedPolicy, tmp_path: Path):
    names = [name for name, _ in two.weights()]
    assert two.consume_weights(RankConsumers({1: names_and_rank})) == (names, 1)
    both = {rank: partial(write_names, tmp_path / str(rank)) for rank in (0, 1)}
    assert two.consume_weights(RankConsumers(both)) == len(names)
    assert [(tmp_path / str(rank)).read_text().split() for rank in (0, 1)] == [names, names]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_take_the_weights_fails_for_all_when_they_are_done(two: DistributedPolicy, failing: int):
    with pytest.raises(BackendError, match="cannot take"):
        two.consume_weights(RankConsumers({failing: refuse_second, 1 - failing: names_and_rank}))
    assert len(two.log_probs(random_rows())) == 9


def test_a_failure_to_take_the_weights_is_raised_here_and_the_ranks_go_on(two: DistributedPolicy):
    with pytest.raises(BackendError, match="cannot take"):
        two.consume_weights(refuse_second)
    assert len(two.log_probs(random_rows())) == 9


def test_threads_take_turns(two: DistributedPolicy):
    expected, stream = two.log_probs(random_rows()), two.weights()
    first = next(stream)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(two.log_probs, random_rows()) for _ in range(4)]
        names = [name for name, _ in stream]
        assert [found.result(timeout=60) for found in waiting] == [expected] * 4
    assert first[0] not in names


def test_a_rank_exception_comes_back_with_its_type_and_traceback(two: DistributedPolicy):
    with pytest.raises(ZeroDivisionError, match="a loss that fails") as caught:
        two.forward_backward(random_rows(), Failing())
    assert "policy_cases.py" in caught.value.__notes__[0]
    assert len(two.log_probs(random_rows())) == 9


def test_a_policy_that_cannot_be_built_leaves_no_process(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        DistributedPolicy(LocalExecutor(), partial(new_policy, tmp_path), ranks=2)


def test_a_killed_rank_is_reported_and_the_others_end(model_dir: ModelDir, tmp_path: Path):
    group = DistributedPolicy(LocalExecutor(), partial(new_policy, model_dir()), ranks=2)
    pids = [process.pid for process in group._ranks._processes]
    profiler = RoundProfiler((1, 1), tmp_path, policy=group)
    profiler.before_round(1)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(BackendError, match=r"rank 1 of 2 died \(exit code -9; out of memory\?\)"):
        group.log_probs(random_rows())
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(BackendError, match="have ended"):
        group.optim_step()
    profiler.close()  # as a run ends that restarts
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["rounds_1-1.json.gz"]


def test_ranks_end_with_a_parent_that_was_killed(model_dir: ModelDir):
    code = f"""
import sys, time
sys.path[:0] = {sys.path!r}
from functools import partial
from pathlib import Path
from policy_cases import new_policy
from slimectl.executors.local import LocalExecutor
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.rank_group import DistributedPolicy
from slimectl.protocols import NamedTensors
group = DistributedPolicy(LocalExecutor(), partial(new_policy, Path({str(model_dir())!r})), ranks=2)
print(*[process.pid for process in group._ranks._processes], flush=True)
time.sleep(60)
"""
    parent = forkserver.start_python(code, cwd=Path.cwd(), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


def names_and_rank(weights: NamedTensors) -> tuple[list[str], int]:
    return [name for name, _ in weights], torch.distributed.get_rank()


def write_names(file: Path, weights: NamedTensors) -> int:
    names = [name for name, _ in weights]
    file.write_text(" ".join(names))
    return len(names)


def first_name(weights: NamedTensors) -> str:
    return next(iter(weights))[0]


def refuse_second(weights: NamedTensors) -> None:
    for i, (name, _) in enumerate(weights):
        if i == 1:
            raise BackendError(f"cannot take {name}")


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
