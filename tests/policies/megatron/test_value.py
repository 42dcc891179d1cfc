"""A critic's values are its head times the model's hidden states, and it learns at any layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import random_rows
from rank_cases import Ranks, megatron
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slimectl.architectures.parallel import ParallelLayout
from slimectl.policies.megatron.policy import MegatronCritic

ModelDir = Callable[..., Path]


@dataclass(frozen=True)
class Squared:
    """Towards the row's advantage."""

    needs_entropy: bool = False

    def __call__(self, pack: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (pack.weights_T * (pack.logprobs_T - pack.advantages_T).square()).sum(), {}


@pytest.fixture(scope="module")
def with_head(four_layers: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("critic")
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)) * 0.1
    save_file(load_file(four_layers() / "model.safetensors") | {"score.weight": head}, folder / "model.safetensors")
    (folder / "config.json").write_text((four_layers() / "config.json").read_text())
    return folder


def test_values_are_the_head_of_the_hidden_states_that_predict_the_tokens(four_layers: ModelDir, with_head: Path):
    rows = random_rows()
    model = AutoModelForCausalLM.from_pretrained(four_layers(), dtype=torch.float32)
    head = load_file(with_head / "model.safetensors")["score.weight"]
    for row, values in zip(rows, megatron(with_head, kind=MegatronCritic).values(rows), strict=True):
        with torch.no_grad():
            hidden_TH = model.model(torch.tensor([row.tokens])).last_hidden_state[0]
        expected = (hidden_TH @ head.T)[row.prompt_length - 1 : -1, 0]
        assert values == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_critic_begins_at_zero_learns_and_goes_on_from_its_checkpoint(four_layers: ModelDir, tmp_path: Path):
    rows = random_rows()
    critic = megatron(four_layers("tied"), kind=MegatronCritic)
    assert {value for values in critic.values(rows) for value in values} == {0.0}
    losses = []
    for _ in range(12):
        losses.append(critic.forward_backward(rows, Squared())["loss"])
        critic.optim_step()
    assert losses[-1] < 0.5 * losses[0]
    critic.save(tmp_path)
    assert json.loads((tmp_path / "trainer" / "trainer.json").read_text())["step"] == 12
    resumed = megatron(tmp_path, kind=MegatronCritic)
    resumed.load(tmp_path)
    assert resumed.values(rows) == critic.values(rows)
    assert resumed.forward_backward(rows, Squared()) == critic.forward_backward(rows, Squared())
    assert resumed.optim_step() == critic.optim_step()


LAYOUTS = [ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(context=2), ParallelLayout()]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_ranks_equal_one(two: Ranks, with_head: Path, layout: ParallelLayout):
    rows = random_rows(groups=4)
    one = megatron(with_head, kind=MegatronCritic)
    two.build(with_head, kind=MegatronCritic, layout=layout)
    for _ in range(2):
        assert two.forward_backward(rows, Squared()) == pytest.approx(one.forward_backward(rows, Squared()), rel=1e-6)
        assert two.optim_step() == pytest.approx(one.optim_step(), rel=1e-5)
    for found, expected in zip(two.values(rows), one.values(rows), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    for (name, tensor), (other, expected) in zip(two.weights(), one.weights(), strict=True):
        assert name == other
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
