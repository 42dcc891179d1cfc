"""Adapters on Megatron-core: the FSDP policy's numbers, at any layout, in the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, assert_merged_are_weights, new_policy, random_rows
from rank_cases import STEADY, Ranks, megatron
from safetensors.torch import load_file

from slimectl.algorithms.losses import PolicyLoss
from slimectl.algorithms.value_loss import PolicyAndValueLoss, ValueLoss
from slimectl.architectures.parallel import ParallelLayout
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import CheckpointError, SettingsError
from slimectl.policies.fsdp.policy import FsdpActorCritic
from slimectl.policies.lora import LoraOptions, initial
from slimectl.policies.megatron.policy import MegatronActorCritic, MegatronCritic
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.recompute import Recompute

ModelDir = Callable[..., Path]
Outcome = tuple[list[dict[str, float]], dict[str, torch.Tensor]]
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "v_proj")
TARGETS = {"latent": LATENT, "delta": DELTA}


def lora(*targets: str, load: Path | None = None) -> LoraOptions:
    return LoraOptions(4, 8.0, targets or EVERY, load)


def steps(policy: Any, count: int = 2) -> list[dict[str, float]]:
    rows = [random_rows(groups=4, seed=seed) for seed in range(count)]
    return [policy.forward_backward(each, Clipped()) | policy.optim_step() for each in rows]


def snapshot(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def saved(policy: Any, folder: Path) -> Path:
    folder.mkdir()
    policy.save(folder)
    return folder


def assert_equal(found: Outcome, expected: Outcome) -> None:
    for report, other in zip(found[0], expected[0], strict=True):
        assert report == pytest.approx(other, rel=1e-5)
    assert list(found[1]) == list(expected[1])
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, expected[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "tied"])
@pytest.mark.parametrize("targets", [EVERY, ("q_proj", "v_proj"), ("up_proj",)], ids=len)
def test_the_steps_are_those_of_the_fsdp_policy(four_layers: ModelDir, kind: str, targets: tuple[str, ...]):
    fsdp = new_policy(four_layers(kind), optimizer=STEADY, lora=lora(*targets))
    policy = megatron(four_layers(kind), lora=lora(*targets))
    before = snapshot(policy)
    assert_equal((steps(policy), snapshot(policy)), (steps(fsdp), snapshot(fsdp)))
    moved = {name.split(".")[-2] for name, tensor in policy.weights() if not torch.equal(tensor, before[name])}
    assert moved == set(targets)


@pytest.mark.parametrize("kind", ["tied", "experts", "latent", "delta"])
def test_the_gradient_of_an_adapter_is_that_of_its_matrix(four_layers: ModelDir, kind: str):
    """With an eps far above all gradients Adam's update is -lr / eps times the gradient: here, minus the gradient.

    B begins at 0 and dB = s dW A' (s = alpha / rank), so the matrix moves by s² dW A' A.
    """
    targets = TARGETS.get(kind, EVERY)
    plain_sgd = OptimizerOptions(lr=1e6, eps=1e6, weight_decay=0.0, clip_grad=0.0)
    plain = megatron(four_layers(kind), optimizer=plain_sgd)
    adapted = megatron(four_layers(kind), optimizer=plain_sgd, lora=lora(*targets))
    before = snapshot(plain)
    for found, expected in zip(adapted.log_probs(random_rows()), plain.log_probs(random_rows()), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    steps(plain, 1)
    steps(adapted, 1)
    after, matrices = snapshot(plain), {name for name, each in before.items() if each.ndim == 2}
    chosen = {name for name in matrices if name.split(".")[-2] in targets}
    moved = {name for name, tensor in adapted.weights() if not torch.equal(tensor, before[name])}
    assert moved <= chosen
    assert len(moved) > 0.9 * len(chosen)  # an expert that met no token has no gradient
    for name, tensor in ((name, tensor) for name, tensor in adapted.weights() if name in chosen):
        a_KI = initial(f"{name.removesuffix('weight')}lora_A.weight", (4, tensor.shape[1]), seed=0)
        expected = before[name] + 4 * (after[name] - before[name]) @ a_KI.T @ a_KI
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-6)


def test_recomputed_layers_learn_although_their_input_has_no_gradient(four_layers: ModelDir):
    policy = megatron(four_layers(), lora=lora(), recompute=Recompute("full"))
    for found, expected in zip(steps(policy, 2), steps(megatron(four_layers(), lora=lora()), 2), strict=True):
        assert found == pytest.approx(expected, rel=2e-6)


TWO: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"layout": ParallelLayout(tensor=2)}),
    ("tied", {}),
    ("dense", {"layout": ParallelLayout(pipeline=2, virtual_pipeline=2), "recompute": Recompute("full")}),
    ("dense", {"layout": ParallelLayout(context=2), "distributed_optimizer": False}),
    ("experts", {"layout": ParallelLayout(expert=2)}),
    ("experts", {"layout": ParallelLayout(tensor=2, expert_tensor=2)}),
    ("experts", {"layout": ParallelLayout(expert_tensor=2)}),
    ("latent", {"layout": ParallelLayout(tensor=2, expert=2)}),
    ("delta", {"layout": ParallelLayout(tensor=2)}),
]
FOUR: list[tuple[str, dict[str, Any]]] = [
    ("tied", {"layout": ParallelLayout(tensor=2, pipeline=2)}),
    ("experts", {"layout": ParallelLayout(tensor=2, pipeline=2, expert=2)}),
]


@pytest.fixture(scope="module")
def alone(four_layers: ModelDir) -> Callable[[str], Outcome]:
    """What one process makes of a model."""
    made: dict[str, Outcome] = {}

    def outcome(kind: str) -> Outcome:
        if kind not in made:
            policy = megatron(four_layers(kind), lora=lora(*TARGETS.get(kind, EVERY)))
            made[kind] = steps(policy), snapshot(policy)
        return made[kind]

    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), TWO, ids=str)
def test_two_ranks_equal_one(two: Ranks, four_layers: ModelDir, alone: Any, kind: str, options: dict[str, Any]):
    two.build(four_layers(kind), lora=lora(*TARGETS.get(kind, EVERY)), **options)
    assert_equal((steps(two), snapshot(two)), alone(kind))
    assert_merged_are_weights(two, four_layers(kind))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), FOUR, ids=str)
def test_four_ranks_equal_one(four: Ranks, four_layers: ModelDir, alone: Any, kind: str, options: dict[str, Any]):
    four.build(four_layers(kind), lora=lora(*TARGETS.get(kind, EVERY)), **options)
    assert_equal((steps(four), snapshot(four)), alone(kind))


def test_either_trainer_goes_on_where_the_other_stopped(four_layers: ModelDir, tmp_path: Path):
    policy = megatron(four_layers("tied"), lora=lora())
    steps(policy)
    fsdp = new_policy(four_layers("tied"), optimizer=STEADY, lora=lora())
    fsdp.load(saved(policy, tmp_path / "megatron"))
    resumed = megatron(four_layers("tied"), lora=lora())
    resumed.load(saved(fsdp, tmp_path / "fsdp"))
    for file in ("adapter/adapter_model.safetensors", "trainer/optimizer.safetensors", "model.safetensors"):
        ours, theirs = (load_file(tmp_path / kind / file) for kind in ("megatron", "fsdp"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    expected = steps(policy)
    assert steps(resumed) == expected
    for found, other in zip(steps(fsdp), expected, strict=True):
        assert found == pytest.approx(other, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_what_two_ranks_saved_one_goes_on_with(two: Ranks, four_layers: ModelDir, tmp_path: Path, kind: str):
    layout = ParallelLayout(tensor=2, expert=2 if kind == "experts" else 1)
    two.build(four_layers(kind), lora=lora(), layout=layout)
    steps(two)
    two.save(tmp_path)
    alone = megatron(four_layers(kind), lora=lora())
    alone.load(tmp_path)
    assert_equal((steps(alone), snapshot(alone)), (steps(two), snapshot(two)))
    two.build(four_layers(kind), lora=lora(), layout=ParallelLayout(pipeline=2))
    two.load(tmp_path)
    again = megatron(tmp_path, lora=lora())  # which begins at the merged model, and must not add to it
    again.load(tmp_path)
    assert_equal((steps(two, 1), snapshot(two)), (steps(again, 1), snapshot(again)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peft_reads_what_megatron_wrote_and_megatron_what_peft_did(four_layers: ModelDir, tmp_path: Path, dtype: str):
    import peft
    from transformers import AutoModelForCausalLM

    policy = megatron(four_layers(), lora=lora(), dtype=dtype)
    assert all(report["grad_norm"] > 0 for report in steps(policy))
    adapter = saved(policy, tmp_path / "ours") / "adapter"
    plain = AutoModelForCausalLM.from_pretrained(four_layers(), dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, adapter)
    theirs.save_pretrained(tmp_path / "theirs")
    taken = megatron(four_layers(), lora=lora(load=tmp_path / "theirs"), dtype=dtype)
    merged = theirs.merge_and_unload().state_dict()
    for (name, tensor), (_, other) in zip(policy.weights(), taken.weights(), strict=True):
        assert torch.equal(tensor, other)
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-6)


def test_a_critic_keeps_its_head_in_the_adapter(four_layers: ModelDir, tmp_path: Path):
    def new() -> Any:
        return megatron(four_layers(), kind=MegatronCritic, lora=lora())

    rows, critic = random_rows(), new()
    steps(critic)
    critic.save(tmp_path)
    assert "base_model.model.score.weight" in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == ["score"]
    resumed = new()
    resumed.load(tmp_path)
    assert resumed.values(rows) == critic.values(rows)
    assert max(abs(value) for values in critic.values(rows) for value in values) > 0


def test_a_policy_that_is_its_own_critic_keeps_its_head_beside_what_peft_reads(four_layers: ModelDir, tmp_path: Path):
    import peft
    from transformers import AutoModelForCausalLM

    policy = megatron(four_layers("tied"), kind=MegatronActorCritic, lora=lora())
    rows = random_rows(groups=4)
    for row in rows:
        row.values, row.returns = [0.0] * row.response_length, row.advantages
    loss = PolicyAndValueLoss(PolicyLoss(), ValueLoss(value_clip=10.0), 0.5)
    policy.forward_backward(rows, loss)
    policy.optim_step()
    fsdp = FsdpActorCritic(four_layers("tied"), HFCheckpoint(), TrainerOptions(optimizer=STEADY, lora=lora()))
    fsdp.load(saved(policy, tmp_path / "megatron"))
    assert fsdp.forward_backward(rows, loss) == pytest.approx(policy.forward_backward(rows, loss), rel=1e-5)
    assert fsdp.optim_step() == pytest.approx(policy.optim_step(), rel=1e-5)
    for found, expected in zip(fsdp.values(rows), policy.values(rows), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(four_layers("tied"), dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, saved(fsdp, tmp_path / "fsdp") / "adapter").merge_and_unload()
    merged = theirs.state_dict()
    assert all(torch.allclose(tensor, merged[name], atol=1e-6) for name, tensor in fsdp.weights())


def test_what_cannot_be_is_refused(four_layers: ModelDir, tmp_path: Path):
    with pytest.raises(SettingsError, match=r"no linear layer is named lm_head. Available: \['down_proj', .*'v_proj'"):
        megatron(four_layers(), lora=lora("lm_head"))
    with pytest.raises(SettingsError, match=r"moe_router_bias_update_rate: is not possible with train.lora_rank \(it"):
        megatron(four_layers("latent"), lora=lora("o_proj"), args={"moe_router_bias_update_rate": 1e-3})
    with pytest.raises(SettingsError, match=r"torch_dist cannot store adapters\. Set hf with train.lora_rank"):
        megatron(four_layers(), lora=lora(), save_format="torch_dist")
    policy = megatron(four_layers(), lora=lora())
    policy.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds model.layers.0.mlp.down_proj.lora_A.weight, which would not be"):
        megatron(four_layers(), lora=lora("q_proj", load=tmp_path / "adapter"))
