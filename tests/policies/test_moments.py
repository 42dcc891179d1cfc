"""Moments in 8 bits: values of the map by hand, rounding, restoring, and steps beside AdamW's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import Clipped, new_policy, random_rows
from safetensors.torch import load_file

from slimectl.policies.moments import PRECISIONS, State, dynamic_map
from slimectl.policies.optimizer import ChunkedAdamW, OptimizerOptions


def test_the_map_doubles_its_values_in_every_decade():
    signed, unsigned = dynamic_map(signed=True), dynamic_map(signed=False)
    for values in (signed, unsigned):
        assert len(set(values.tolist())) == 256
        assert values.tolist() == sorted(values.tolist())
    # 64 intervals of 0.9 / 64 from 0.1 to 1: the last center is half an interval below 1.
    assert signed[-2].item() == pytest.approx(1 - 0.9 / 128)
    assert signed[0].item() == pytest.approx(-(1 - 0.9 / 128))
    assert signed[signed > 0][0].item() == pytest.approx(5.5e-7)
    assert unsigned[-2].item() == pytest.approx(1 - 0.9 / 256)  # 128 intervals
    assert unsigned[:2].tolist() == pytest.approx([0, 3.25e-7])
    assert (signed.sum().item(), unsigned[0].item()) == (pytest.approx(1, abs=1e-5), 0)


def stored(values: torch.Tensor, name: str) -> tuple[torch.Tensor, State]:
    moments, state = PRECISIONS["int8"], {}
    moments.allocate(state, name, values)
    moments.write(state, name, 0, values)
    return moments.read(state, name), state


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_values_are_rounded_within_their_block_and_those_read_are_stored_unchanged(name: str):
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=draw) * 10 ** torch.randint(-9, 3, (1000,), generator=draw).float()
    values = values if name == "exp_avg" else values.square()
    found, state = stored(values, name)
    largest = torch.cat([block.abs().amax().expand(len(block)) for block in values.split(256)])
    assert ((found - values).abs() <= largest * 0.9 / 128 + 1e-12).all()
    assert torch.equal(found[values.abs() == largest], values[values.abs() == largest])  # of either sign
    again, same = stored(found, name)
    assert torch.equal(found, again)
    assert state.keys() == {name, f"{name}_scale"}
    assert all(torch.equal(state[key], same[key]) for key in state)
    assert (state[name].dtype, state[name].shape, state[f"{name}_scale"].shape) == (torch.uint8, (1000,), (4,))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_codes_are_of_the_nearest_values_by_a_search(name: str):
    values_map = dynamic_map(signed=name == "exp_avg")
    middles = (values_map[1:] + values_map[:-1]) / 2
    near = [torch.nextafter(middles, torch.tensor(bound)) for bound in (2.0, -2.0)]
    # -1 would be the first of the largest values of its block, and so be stored as 1 with a negative scale.
    spread = torch.linspace(-0.9999 if name == "exp_avg" else 0, 1, 100_001)
    values = torch.cat([values_map, middles, *near, spread, torch.zeros(3)])
    codes = []
    for block in values.split(255):  # each with a largest value of 1
        _, state = stored(torch.cat([block, torch.ones(1)]), name)
        codes.append(state[name][:-1])
    assert torch.equal(torch.cat(codes).int(), torch.bucketize(values, middles, out_int32=True))


def test_steps_stay_near_those_of_adamw():
    draw = torch.Generator().manual_seed(0)
    weights = [torch.ones(5000, requires_grad=True) for _ in range(2)]
    options = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = ChunkedAdamW(weights[:1], state_dtype="int8", **options), torch.optim.AdamW(weights[1:], **options)
    drift = torch.randn(5000, generator=draw)
    for i in range(30):
        gradient = drift + torch.randn(5000, generator=draw)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
        if i == 0:  # nothing has been rounded yet
            torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)
    moved = (weights[1] - 1).detach()
    assert (weights[0] - weights[1]).norm() < 0.02 * moved.norm()


def test_a_checkpoint_restores_codes_and_scales(model_dir: Any, tmp_path: Path):
    optimizer = OptimizerOptions(lr=1e-3, state_dtype="int8")
    whole, resumed = (new_policy(model_dir("qwen3_moe"), optimizer=optimizer) for _ in range(2))
    for seed in range(2):
        whole.forward_backward(random_rows(seed=seed), Clipped())
        whole.optim_step()
    whole.save(tmp_path)
    resumed.load(tmp_path)
    sizes = set()
    for name, master in whole.masters.trained.items():
        state, restored = whole.optimizer.state[master], resumed.optimizer.state[resumed.masters.trained[name]]
        assert state.keys() == restored.keys()
        assert all(torch.equal(state[key], restored[key]) for key in state)
        assert (state["exp_avg"].dtype == torch.uint8) == (master.numel() >= 4096)
        sizes.add(master.numel() >= 4096)
    assert sizes == {True, False}
    # The file has the values, so that a run continues with moments in float32, too.
    plain = new_policy(model_dir("qwen3_moe"), optimizer=replace(optimizer, state_dtype="float32"))
    plain.load(tmp_path)
    saved = load_file(tmp_path / "trainer" / "optimizer.safetensors")["exp_avg.model.embed_tokens.weight"]
    assert torch.equal(plain.optimizer.state[plain.masters.trained["model.embed_tokens.weight"]]["exp_avg"], saved)
