"""Images in the FSDP policy: transformers' log-probabilities and gradients, sharing, ranks, checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import WeightedNegativeLogProb
from safetensors.torch import load_file
from vision_models import CONFIGS, image_file, image_prompt, reference_log_probs, reference_model, vision_model

from slimectl.algorithms.packing import plan_batches
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.data.images import processor_of
from slimectl.errors import RecordError
from slimectl.executors.local import LocalExecutor
from slimectl.policies.fsdp.policy import FsdpActorCritic, FsdpPolicy
from slimectl.policies.lora import LoraOptions
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.rank_group import DistributedPolicy
from slimectl.policies.recompute import Recompute
from slimectl.types import TrainingSample

LOSS = WeightedNegativeLogProb()


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[TrainingSample]:
    """Two answers each to a prompt of one image, to the same words about another one, to two images, and to none."""
    first, second = (image_file(folder / f"{seed}.png", seed=seed) for seed in (1, 2))
    wide = image_file(folder / "wide.png", width=48, height=24)
    rows = []
    for group, images in enumerate(([first], [second], [wide, first], [])):
        prompt = image_prompt(processor_of(str(folder)), images)
        for answer in (b"red", b"blue!"):
            weights = [0.1] * len(answer)
            rows.append(TrainingSample([*prompt, *answer], len(answer), weights, group=group, images=list(images)))
    return rows


def new(folder: Path, **options: Any) -> FsdpPolicy:
    # With Adam's usual eps a gradient that is rounding error alone (3e-8, in one weight) would move its weight.
    return FsdpPolicy(
        folder, HFCheckpoint(), TrainerOptions(**({"optimizer": OptimizerOptions(lr=1e-2, eps=1e-5)} | options))
    )


def test_log_probs_and_gradients_are_those_of_transformers(folder: Path, rows: list[TrainingSample]):
    policy, model = new(folder, freeze_vision_tower=False), reference_model(folder)
    expected = [reference_log_probs(model, row, folder) for row in rows]
    for row_log_probs, expected_R in zip(policy.log_probs(rows), expected, strict=True):
        assert (torch.tensor(row_log_probs) - expected_R).abs().max() < 1e-5
    (-0.1 * torch.cat(expected).sum()).backward()
    policy.forward_backward(rows, LOSS)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients["model.visual.patch_embed.proj.weight"].abs().max() > 1e-3
    for name, parameter in policy.model.hf.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5, msg=name)


def test_rows_share_tokens_only_with_the_same_images(rows: list[TrainingSample]):
    tries = [trie for pack in plan_batches(rows, max_tokens=4096)[0] for trie in pack]
    assert sorted(tuple(sorted(trie.rows)) for trie in tries) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {trie.shared[1] for trie in tries} == {rows[i].prompt_length for i in (0, 4, 6)}


def test_packs_of_one_row_give_the_same(folder: Path, rows: list[TrainingSample]):
    together, apart = new(folder), new(folder, max_tokens_per_pack=1, share_prefixes=False)
    for one, other in zip(together.log_probs(rows), apart.log_probs(rows), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def step(policy: Any, rows: list[TrainingSample]) -> tuple[float, float, dict[str, torch.Tensor]]:
    loss = policy.forward_backward(rows, LOSS)["loss"]
    norm = policy.optim_step()["grad_norm"]
    return loss, norm, policy.consume_weights(dict)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_two_ranks_equal_one(folder: Path, rows: list[TrainingSample], frozen: bool):
    """Packs of one row: with a trained tower, a rank without images takes part in its reduction."""
    options = {"freeze_vision_tower": frozen, "max_tokens_per_pack": 1, "share_prefixes": False}
    loss, norm, weights = step(new(folder, **options), rows)
    group = LocalExecutor()
    try:
        policy = DistributedPolicy(group, partial(new, folder, **options), ranks=2)
        two_loss, two_norm, two_weights = step(policy, rows)
        policy.close()
    finally:
        group.close()
    assert (two_loss, two_norm) == pytest.approx((loss, norm), rel=1e-5)
    before = load_file(folder / "model.safetensors")
    moved = {name for name, tensor in weights.items() if not torch.equal(tensor, before[name])}
    assert any("visual." in name for name in moved) is not frozen
    assert any(name.endswith("embed_tokens.weight") for name in moved)
    for name, tensor in weights.items():
        torch.testing.assert_close(two_weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_checkpoint_has_published_names_and_the_processor_and_goes_on(
    folder: Path, rows: list[TrainingSample], tmp_path: Path
):
    policy = new(folder, freeze_vision_tower=False)
    step(policy, rows)
    policy.save(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    again = new(tmp_path, freeze_vision_tower=False)
    again.load(tmp_path)
    assert again.log_probs(rows) == policy.log_probs(rows)  # with the image processor that was saved
    torch.testing.assert_close(step(again, rows)[2], step(policy, rows)[2], rtol=0, atol=0)
    for expected_R, log_probs in zip(
        (reference_log_probs(reference_model(tmp_path), row, tmp_path) for row in rows[:1]),
        new(tmp_path).log_probs(rows[:1]),
        strict=True,
    ):
        assert expected_R.tolist() == pytest.approx(log_probs, abs=1e-5)


def test_tokens_that_do_not_fit_their_images_are_named_by_sample(folder: Path, rows: list[TrainingSample]):
    for count in (2, 15, 17, 32):
        tokens = [259, *[261] * count, 260, 65, 66]
        bad = TrainingSample(tokens, 1, [1.0], index=7, images=rows[0].images)
        with pytest.raises(RecordError, match="sample 7: image 0 is 16 tokens for this model"):
            new(folder).log_probs([bad])


def test_recomputation_bfloat16_adapters_and_critics_read_images(folder: Path, rows: list[TrainingSample]):
    plain = new(folder, freeze_vision_tower=False)
    loss, norm, _ = step(plain, rows)
    again = step(new(folder, freeze_vision_tower=False, recompute=Recompute("full")), rows)
    assert again[:2] == pytest.approx((loss, norm), rel=1e-6)
    rounded = step(new(folder, freeze_vision_tower=False, dtype="bfloat16"), rows)
    assert rounded[:2] == pytest.approx((loss, norm), rel=0.02)
    adapted = new(folder, lora=LoraOptions(rank=2, alpha=2.0, targets=("q_proj", "down_proj")))
    _, _, weights = step(adapted, rows)
    before = load_file(folder / "model.safetensors")
    moved = {name for name, tensor in weights.items() if not torch.equal(tensor, before[name])}
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "down_proj"}
    both = FsdpActorCritic(folder, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-2)))
    assert both.log_probs(rows) == new(folder).log_probs(rows)
    assert [len(values) for values in both.values(rows)] == [row.response_length for row in rows]
