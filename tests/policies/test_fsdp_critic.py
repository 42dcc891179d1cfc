"""A critic's values are its head times the model's hidden states; it learns, is saved, and two ranks equal one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import add_value_head, random_rows, rows_with_returns
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slimectl.algorithms.value_loss import ValueLoss
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.executors.local import LocalExecutor
from slimectl.policies.fsdp.policy import FsdpCritic
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.rank_group import DistributedPolicy

ModelDir = Callable[..., Path]


def new_critic(folder: Path, **options: Any) -> FsdpCritic:
    return FsdpCritic(folder, HFCheckpoint(), TrainerOptions(**({"optimizer": OptimizerOptions(lr=3e-3)} | options)))


@pytest.fixture(scope="module", params=["llama", "llama_untied"])
def with_head(request: pytest.FixtureRequest, model_dir: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_value_head(model_dir(request.param), tmp_path_factory.mktemp("critic"))


def test_values_are_the_head_of_the_hidden_states_that_predict_the_tokens(with_head: Path):
    rows = random_rows()
    model = AutoModelForCausalLM.from_pretrained(with_head, dtype=torch.float32)
    head = load_file(with_head / "model.safetensors")["score.weight"]
    for row, values in zip(rows, new_critic(with_head).values(rows), strict=True):
        with torch.no_grad():
            hidden_TH = model.model(torch.tensor([row.tokens])).last_hidden_state[0]
        expected = (hidden_TH @ head.T)[row.prompt_length - 1 : -1, 0]
        assert values == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_begins_at_zero_learns_and_goes_on_from_its_checkpoint(
    model_dir: ModelDir, tmp_path: Path, dtype: str
):
    rows = rows_with_returns()
    critic = new_critic(model_dir("llama_untied"), dtype=dtype)
    assert {value for values in critic.values(rows) for value in values} == {0.0}
    losses = []
    for _ in range(12):
        losses.append(critic.forward_backward(rows, ValueLoss(value_clip=10.0))["loss"])
        critic.optim_step()
    assert losses[-1] < 0.5 * losses[0]
    critic.save(tmp_path)
    resumed = new_critic(tmp_path, dtype=dtype)
    resumed.load(tmp_path)
    assert resumed.weight_version == "12"
    assert resumed.values(rows) == critic.values(rows)
    assert resumed.forward_backward(rows, ValueLoss()) == critic.forward_backward(rows, ValueLoss())
    assert resumed.optim_step() == critic.optim_step()


@pytest.mark.slow
def test_two_ranks_equal_one(with_head: Path):
    rows = rows_with_returns()
    one = new_critic(with_head)
    two: Any = DistributedPolicy(LocalExecutor(), partial(new_critic, with_head), ranks=2)
    try:
        for _ in range(2):
            reports = [
                each.forward_backward(rows, ValueLoss(value_clip=0.2)) | each.optim_step() for each in (one, two)
            ]
            assert reports[1] == pytest.approx(reports[0], rel=1e-5)
        for alone, ranked in zip(one.values(rows), two.values(rows), strict=True):
            assert ranked == pytest.approx(alone, abs=5e-5)  # two steps of Adam enlarge the rounding
    finally:
        two.close()


@dataclass(frozen=True)
class Largest:
    """A loss that reports a maximum."""

    needs_entropy: bool = False

    def __call__(self, pack: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return pack.logprobs_T.sum() * 0, {"weight_max": pack.returns_T.max(), "tokens": pack.weights_T.new_ones(())}


def test_a_maximum_is_the_largest_of_all_packs_and_a_sum_the_sum(model_dir: ModelDir):
    rows = rows_with_returns()
    rows[4].returns = [7.0] * rows[4].response_length
    found = new_critic(model_dir(), max_tokens_per_pack=32).forward_backward(rows, Largest())
    assert found["weight_max"] == 7.0
    assert found["tokens"] > 1
