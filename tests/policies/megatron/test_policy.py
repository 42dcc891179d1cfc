"""One process: what is recomputed, frozen, clipped, offloaded and refused."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, WeightedNegativeLogProb, new_policy, random_rows
from rank_cases import STEADY, megatron
from safetensors.torch import load_file

from slimectl.architectures.parallel import ParallelLayout
from slimectl.errors import RecordError, SettingsError
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.recompute import Recompute
from slimectl.types import TrainingSample

ModelDir = Callable[..., Path]


def steps(policy: Any, count: int = 2) -> list[dict[str, float]]:
    return [
        policy.forward_backward(random_rows(groups=4, seed=seed), Clipped()) | policy.optim_step()
        for seed in range(count)
    ]


def snapshot(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": Recompute("full")},
        {"recompute": Recompute("selective", ("core_attn",))},
        {"recompute": Recompute("selective", ("mlp",))},
        {"optimizer_cpu_offload": True},
        {"optimizer_cpu_offload": True, "distributed_optimizer": False},
        {"max_tokens_per_pack": 20},
        {"args": {"bucket_size": 1000, "pad_buckets_for_high_nccl_busbw": True, "pin_cpu_grads": False}},
    ],
    ids=str,
)
def test_what_saves_memory_does_not_change_the_step(four_layers: ModelDir, options: dict[str, Any]):
    for found, expected in zip(steps(megatron(four_layers(), **options)), steps(megatron(four_layers())), strict=True):
        assert found == pytest.approx(expected, rel=2e-6)


def test_dropout_of_megatron_args_is_in_the_gradient_and_not_in_log_probs(four_layers: ModelDir):
    rows, dropped = random_rows(), megatron(four_layers(), args={"hidden_dropout": 0.5})
    plain = megatron(four_layers(), share_prefixes=False)
    assert dropped.log_probs(rows) == plain.log_probs(rows)
    losses = [policy.forward_backward(rows, WeightedNegativeLogProb())["loss"] for policy in (dropped, plain)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert dropped.log_probs(rows) == plain.log_probs(rows)


def test_log_probs_equal_the_fsdp_policy_at_a_temperature(four_layers: ModelDir):
    rows = random_rows(groups=4)
    found = megatron(four_layers("tied"), temperature=0.7).log_probs(rows)
    for values, expected in zip(found, new_policy(four_layers("tied"), temperature=0.7).log_probs(rows), strict=True):
        assert values == pytest.approx(expected, abs=1e-5)


def test_a_response_of_no_tokens_and_of_one_token(four_layers: ModelDir):
    rows = [
        TrainingSample([1, 2, 3], 0, []),
        TrainingSample([1, 2, 3, 4], 1, [1.0]),
        TrainingSample([5, 6], 1, [1.0], group=1),
    ]
    policy = megatron(four_layers())
    assert [len(values) for values in policy.log_probs(rows)] == [0, 1, 1]
    assert policy.forward_backward(rows, WeightedNegativeLogProb())["weight"] == 2.0


def test_rows_without_weight_change_nothing_but_the_version(four_layers: ModelDir):
    rows = random_rows()
    for row in rows:
        row.loss_weights = [0.0] * row.response_length
    policy = megatron(four_layers(), optimizer=OptimizerOptions(lr=1e-3, weight_decay=0.0))
    before = snapshot(policy)
    assert policy.forward_backward(rows, Clipped())["loss"] == 0
    assert policy.optim_step() == {"grad_norm": 0.0, "lr": 1e-3}
    assert policy.weight_version == "1"
    assert policy.forward_backward([], Clipped()) == {"loss": 0.0}
    policy.optim_step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())


def test_moments_start_again_and_a_save_in_the_background_has_the_state_of_its_start(
    four_layers: ModelDir, tmp_path: Path
):
    def step(policy: Any, seed: int) -> dict[str, float]:
        return policy.forward_backward(random_rows(seed=seed), Clipped()) | policy.optim_step()

    policy, other = megatron(four_layers()), megatron(four_layers(), loads_moments=False)
    step(policy, 0)
    folders = [tmp_path / name for name in ("now", "later")]
    for folder in folders:
        folder.mkdir()
    policy.save(folders[0])
    policy.save_in_background(folders[1])
    policy.reset_optimizer()
    other.load(folders[0])
    for seed in (1, 2):
        assert step(policy, seed) == step(other, seed)
    while not policy.is_saved():
        time.sleep(0.01)
    files = [{str(f.relative_to(d)): f.read_bytes() for f in d.rglob("*") if f.is_file()} for d in folders]
    assert files[0] == files[1]
    assert "trainer/optimizer.safetensors" in files[0]


def test_decay_spares_norms_and_biases(four_layers: ModelDir):
    stepped = {}
    for decay in (0.0, 0.5):
        policy = megatron(four_layers("tied"), optimizer=OptimizerOptions(lr=0.1, weight_decay=decay))
        before = snapshot(policy)
        policy.forward_backward(random_rows(), WeightedNegativeLogProb())
        policy.optim_step()
        stepped[decay] = snapshot(policy)
    for name, tensor in stepped[0.5].items():
        shrunk = 0.1 * 0.5 * before[name] if tensor.ndim > 1 else 0.0
        torch.testing.assert_close(tensor, stepped[0.0][name] - shrunk, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_that_is_not_finite_is_left_out(four_layers: ModelDir, dtype: str, distributed: bool):
    rows = random_rows()
    rows[0].loss_weights = [float("inf")] * rows[0].response_length
    policy = megatron(four_layers(), dtype=dtype, distributed_optimizer=distributed)
    before = snapshot(policy)
    policy.forward_backward(rows, WeightedNegativeLogProb())
    assert not torch.isfinite(torch.tensor(policy.optim_step()["grad_norm"]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())
    policy.forward_backward(random_rows(), WeightedNegativeLogProb())
    assert torch.isfinite(torch.tensor(policy.optim_step()["grad_norm"]))
    assert policy.updates == 1


def test_clipping_divides_the_update_but_not_the_reported_norm(four_layers: ModelDir):
    """With an eps far above all gradients, Adam's update is the gradient times lr / eps."""
    free, clipped = (
        megatron(four_layers(), optimizer=OptimizerOptions(lr=1e3, eps=1e6, weight_decay=0.0, clip_grad=limit))
        for limit in (0.0, 0.5)
    )
    before, norm = snapshot(free), steps(free, 1)[0]["grad_norm"]
    assert norm > 0.5
    assert steps(clipped, 1)[0]["grad_norm"] == norm
    name = "model.layers.0.mlp.down_proj.weight"
    moved, limited = (dict(policy.weights())[name] - before[name] for policy in (free, clipped))
    assert limited.norm().item() == pytest.approx(moved.norm().item() * 0.5 / norm, rel=1e-2)


def test_an_offloaded_optimizer_is_saved_and_goes_on(four_layers: ModelDir, tmp_path: Path):
    options = {"dtype": "bfloat16", "optimizer_cpu_offload": True}
    policy = megatron(four_layers(), **options)
    steps(policy)
    policy.save(tmp_path)
    expected = steps(policy)
    resumed = megatron(four_layers(), **options)
    resumed.load(tmp_path)
    assert steps(resumed) == expected


@pytest.mark.parametrize("distributed", [True, False])
def test_bfloat16_learns_and_stays_near_float32(four_layers: ModelDir, distributed: bool):
    rows = random_rows()
    exact = megatron(four_layers())
    policy = megatron(
        four_layers(), dtype="bfloat16", optimizer=OptimizerOptions(lr=1e-3), distributed_optimizer=distributed
    )
    for found, expected in zip(policy.log_probs(rows), exact.log_probs(rows), strict=True):
        assert found == pytest.approx(expected, abs=0.3)
    losses, norms = [], []
    for _ in range(15):
        losses.append(policy.forward_backward(rows, WeightedNegativeLogProb())["loss"])
        norms.append(policy.optim_step()["grad_norm"])
    exact.forward_backward(rows, WeightedNegativeLogProb())
    assert norms[0] == pytest.approx(exact.optim_step()["grad_norm"], rel=0.03)
    assert losses[-1] < 0.7 * losses[0]
    assert {tensor.dtype for _, tensor in policy.weights()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_parameters_stay_and_have_no_optimizer_state(four_layers: ModelDir, tmp_path: Path, dtype: str):
    policy = megatron(four_layers(), dtype=dtype, freeze=["embed_tokens", r"layers\.0\."])
    before = snapshot(policy)
    assert all(report["grad_norm"] > 0 for report in steps(policy))
    stayed = {name for name, tensor in policy.weights() if torch.equal(tensor, before[name])}
    assert stayed == {name for name in before if "embed_tokens" in name or "layers.0." in name}
    policy.save(tmp_path)
    moments = load_file(tmp_path / "trainer" / "optimizer.safetensors")
    assert {name.partition(".")[2] for name in moments} == set(before) - stayed
    policy.load(tmp_path)
    fsdp = new_policy(four_layers(), optimizer=STEADY, freeze=["embed_tokens", r"layers\.0\."])
    if dtype == "float32":
        assert steps(fsdp)[1] == pytest.approx(
            steps(megatron(four_layers(), train_only=sorted(set(before) - stayed)))[1]
        )


def test_recomputed_layers_learn_over_a_frozen_embedding(four_layers: ModelDir):
    found, expected = (
        steps(megatron(four_layers(), freeze=["embed_tokens"], recompute=Recompute(granularity)))
        for granularity in ("full", "none")
    )
    assert found[1] == pytest.approx(expected[1], rel=2e-6)


def test_half_of_a_fused_matrix_cannot_be_frozen(four_layers: ModelDir):
    with pytest.raises(SettingsError, match=r"q_proj.weight is frozen and .*k_proj.weight is not.*Freeze both"):
        megatron(four_layers(), freeze=["q_proj"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"moe_aux_los_coeff": 1}, r"megatron\.args\.moe_aux_los_coeff: .*Did you mean moe_aux_loss_coeff"),
        ({"clip_grad": 2.0}, r"megatron\.args\.clip_grad: slimectl has a setting for this"),
        ({"main_params_dtype": "bf16"}, r"megatron-core rejects the configuration: main_params_dtype"),
        ({"overlap_grad_reduce": True}, r"overlap_grad_reduce: is not possible \(gradients are reduced once per step"),
    ],
)
def test_arguments_that_cannot_be_passed_on_are_refused(four_layers: ModelDir, args: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        megatron(four_layers(), args=args)


def test_other_mistakes_are_refused_before_anything_is_built(four_layers: ModelDir):
    with pytest.raises(SettingsError, match="dtype 'float8': must be float32 or bfloat16"):
        megatron(four_layers(), dtype="float8")
    with pytest.raises(SettingsError, match=r"megatron\.tensor_model_parallel_size"):
        megatron(four_layers(), layout=ParallelLayout(tensor=2))
    rows = random_rows()
    rows[4].old_log_probs = None
    with pytest.raises(RecordError, match=r"row 4: old_log_probs: 0 values for \d+ response tokens"):
        megatron(four_layers()).forward_backward(rows, Clipped())


def test_the_schedule_is_lr_at(four_layers: ModelDir):
    options = dataclasses.replace(STEADY, schedule="cosine", warmup_steps=1, decay_steps=3)
    assert [report["lr"] for report in steps(megatron(four_layers(), optimizer=options), 3)] == [0.0, 1e-3, 5e-4]
