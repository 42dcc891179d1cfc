"""The vision tower in a plan: parameters, saved activations and FLOPs against transformers' tower and a real policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_activations import saved_bytes
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText
from vision_models import CONFIGS, IMAGE, image_file, image_prompt

from slimectl.architectures import cards
from slimectl.architectures.config import with_defaults
from slimectl.architectures.registry import FAMILIES
from slimectl.checkpoints.create import create_model
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.data.images import processor_of
from slimectl.planner import flops, memory, parameters, plan
from slimectl.planner.vision import VisionTower
from slimectl.planner.workload import Run
from slimectl.policies.fsdp.model import Request
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.options import TrainerOptions
from slimectl.policies.pack_plan import PackPlan
from slimectl.policies.recompute import Recompute
from slimectl.types import TrainingSample

PUBLISHED = {
    "qwen2_5_vl": {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048, "in_chans": 3},
    "qwen3_vl": {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}  # fmt: skip
"""What the models of 3B and of 4B state of their towers beside the defaults."""
WIDE = {
    family: {
        **config,
        "vision_config": {**config["vision_config"], "depth": 3, "hidden_size": 32, "intermediate_size": 72},
    }
    for family, config in CONFIGS.items()
}


def tower_of(config: dict[str, Any]) -> VisionTower:
    tower = VisionTower.of(with_defaults(config))
    assert tower is not None
    return tower


def hf_tower(family: str, vision: dict[str, Any], attention: str = "sdpa") -> Any:
    config = AutoConfig.for_model(family, vision_config=vision)
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, attn_implementation=attention).model.visual


@pytest.mark.parametrize("family", CONFIGS)
def test_defaults_are_those_of_transformers(family: str):
    config = json.loads(json.dumps(AutoConfig.for_model(family).vision_config.to_dict()))
    tower = FAMILIES[family].tower
    assert tower is not None
    assert {name: config[name] for name in tower.defaults} == tower.defaults


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("states", ["nothing", "published", "wide"])
def test_parameters_are_those_of_transformers(family: str, states: str):
    vision = {"nothing": {}, "published": PUBLISHED[family], "wide": WIDE[family]["vision_config"]}[states]
    count = sum(parameter.numel() for parameter in hf_tower(family, vision).parameters())
    assert tower_of({**CONFIGS[family], "vision_config": vision}).parameters == count


@pytest.mark.parametrize(("card", "tower"), [("tiny-vl", 206_656), ("tiny-vl3", 293_696)])
def test_the_plan_of_the_card_counts_the_tower_and_trains_it_only_if_asked(card: str, tower: int):
    config = with_defaults(cards.load(card)["config"])
    frozen, trained = (plan.model_of(config, freeze_vision_tower=freeze).all[0] for freeze in (True, False))
    decoder = cards.load(card)["parameters"]
    assert parameters.count(frozen.parts) == parameters.count(trained.parts) == decoder + tower
    assert (parameters.count(frozen.trained), parameters.count(trained.trained)) == (decoder, decoder + tower)
    run = Run(1, policy="fsdp", dtype="float32", seq_len=64, max_tokens_per_gpu=64)
    optimizers = [
        next(figure.value for figure in memory._resident_figures(model, run, 0) if figure.name == "optimizer")
        for model in (frozen, trained)
    ]
    assert optimizers == [8 * decoder, 8 * (decoder + tower)]


@pytest.mark.parametrize(("recompute", "trained"), [("none", False), ("none", True), ("full", True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_policy_saves_what_the_formula_says(family: str, dtype: Any, recompute: Any, trained: bool, tmp_path: Path):
    """With images minus without, so that the decoder's own activations cancel."""
    create_model(WIDE[family], tmp_path / "model", seed=1)
    processor = processor_of(str(tmp_path / "model"))
    images = [image_file(tmp_path / f"{seed}.png", width=64, height=96, seed=seed) for seed in range(2)]
    prompts = [image_prompt(processor, [image]) for image in images]
    options = TrainerOptions(dtype=dtype, recompute=Recompute(recompute), freeze_vision_tower=not trained)
    policy = FsdpPolicy(tmp_path / "model", HFCheckpoint(), options)

    def packed(tower_images: bool) -> PackPlan:
        rows = [
            TrainingSample(
                prompt if tower_images else [token if token != IMAGE else group for token in prompt], 2, [1.0, 1.0],
                group=group, images=(image,) if tower_images else (),
            )
            for group, (prompt, image) in enumerate(zip(prompts, images, strict=True))
        ]  # fmt: skip
        (plan,) = policy._plans(rows, for_loss=False)
        return plan

    def saved(tower_images: bool) -> int:
        plan = packed(tower_images)
        return saved_bytes(lambda: policy._forward(plan, Request()), policy.model.parameters())

    length = len(prompts[0])
    run = Run(
        1, policy="fsdp", dtype=dtype, recompute=recompute, seq_len=length, max_tokens_per_gpu=2 * length, device="cpu",
        images=1, tokens_per_image=8 * 12,
    )  # fmt: skip
    tower, tokens = tower_of(WIDE[family]), 2 * 8 * 12
    formula = tower.activations(run, trained=trained).value
    if not trained:  # the pixels of the pack are held, but not by autograd; it saves the places of the tokens
        formula -= run.bytes * 4 * tokens * tower.patch_values
        places = 8 * tokens
        if tower.deepstack:  # and their mask
            places += len(packed(True).tokens_T)
        assert (formula, saved(tower_images=True) - saved(tower_images=False)) == (0, places)
        return
    if recompute == "full":  # so are the angles
        formula -= 4 * tokens * 2 * 4 * tower.width // tower.heads
    assert saved(tower_images=True) - saved(tower_images=False) == pytest.approx(formula, rel=0.03)


@pytest.mark.parametrize("family", CONFIGS)
def test_flops_are_those_of_the_products_of_transformers_tower(family: str):
    tower, model = tower_of(WIDE[family]), hf_tower(family, WIDE[family]["vision_config"], "eager")
    grid = torch.tensor([[1, 16, 24]])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.to_empty(device="cpu")
        model(torch.zeros(16 * 24, tower.patch_values), grid_thw=grid)
    assert tower.image_flops(8 * 12, trained=False).value == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_a_step_counts_every_image_once_forward_and_thrice_if_it_is_trained():
    config = with_defaults(WIDE["qwen2_5_vl"])
    options: dict[str, Any] = {"seq_len": 100, "batch": 4, "world": 1, "recomputes": False, "tflops": None, "mfu": 1}

    def step(freeze: bool, images: int) -> float:
        model = plan.model_of(config, freeze_vision_tower=freeze)
        figures = flops.flops_figures(model.all, **options, images=images, tokens_per_image=16)
        return next(figure.value for figure in figures if figure.name == "FLOPs per step")

    image = tower_of(WIDE["qwen2_5_vl"]).image_flops(16, trained=False).value
    assert step(True, 2) - step(True, 0) == pytest.approx(8 * image)
    assert step(False, 2) - step(False, 0) == pytest.approx(3 * 8 * image)


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize(("freeze", "passes"), [(True, 1), (False, 3)])
def test_the_rate_of_a_policy_counts_images_as_its_plan_does(freeze: bool, passes: int, family: str):
    model = plan.model_of(with_defaults(WIDE[family]), freeze_vision_tower=freeze).all[0]
    images = flops.image_flops(model, 7)
    assert images is not None
    assert images.forward(16) == tower_of(WIDE[family]).image_flops(16, trained=False).value
    assert images.training(16) == passes * images.forward(16)
