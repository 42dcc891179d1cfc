"""Runs whose prompts have images: a pipe, a kill -9, rounds ahead, an evaluation, a warm-up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vision_models import CONFIGS, image_file, vision_model
from workshop import Workshop, killed, set_up

pytestmark = pytest.mark.slow

TRAINED = ("-s", "train.freeze_vision_tower=false", "-s", "run.num_rollout=2")


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture
def vision(tmp_path: Path, model: Path) -> Workshop:
    """The small run, with an image in all prompts but one; in one it is base64."""
    import base64

    workshop = set_up(tmp_path, model)
    (tmp_path / "images").mkdir()
    rows = []
    for i in range(8):
        image = Path(image_file(tmp_path / "images" / f"{i}.png", height=32 if i % 2 else 16, seed=i))
        source = {"bytes": base64.b64encode(image.read_bytes()).decode()} if i == 2 else f"images/{i}.png"
        row = {"prompt": "<image>What is it?", "images": [source], "label": "a"}
        rows.append(row if i != 3 else {"prompt": [{"role": "user", "content": "And without?"}], "label": "b"})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return workshop


def steps(workshop: Workshop, run: str) -> list[dict]:
    return [line for line in workshop.metrics(run) if "train/step" in line["metrics"]]


def test_a_pipe_and_a_killed_run_write_the_bytes_of_an_undisturbed_one(vision: Workshop):
    vision.slimectl("run", "--name", "whole", *TRAINED)
    whole, broken = (vision.folder / "runs" / name for name in ("whole", "broken"))
    for line in steps(vision, "whole"):
        assert line["metrics"]["train/train_rollout_logprob_abs_diff"] < 1e-5

    assert killed(vision, ["run", "--name", "broken", *TRAINED], broken / "metrics.jsonl", 900)
    vision.slimectl("run", "--resume", "runs/broken")
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    for file in ("policy/model.safetensors", "trainer/policy/optimizer.safetensors"):
        last = Path("step_000002") / file
        assert (broken / last).read_bytes() == (whole / last).read_bytes()

    options = ("-c", "slimectl.toml", "-s", "train.freeze_vision_tower=false", "-s", "run.num_rollout=2")
    sampled = vision.slimectl("rollout", *options, "--data", "prompts.jsonl@[0:4]")
    images = [json.loads(line).get("multimodal_inputs", {}).get("images") for line in sampled.decode().splitlines()]
    assert images[0] == [str(vision.folder / "images" / "0.png")]
    assert list(images[8][0]) == ["bytes"]
    assert images[12] is None
    scored = vision.slimectl("score", "-", "-c", "slimectl.toml", stdin=sampled)
    trained = vision.slimectl("train", "-", *options, "--save", "piped", stdin=scored)
    assert json.loads(trained) == steps(vision, "whole")[0]
    piped = vision.folder / "piped" / "model.safetensors"
    assert piped.read_bytes() == (whole / "step_000001" / "policy" / "model.safetensors").read_bytes()


def test_rounds_ahead_demonstrations_and_a_reference(vision: Workshop):
    """A reference, which reads the same images, says what the new model says; rounds ahead are one version old."""
    vision.slimectl("run", "-s", "run.num_rollout=2", "-s", "run.async_level=1", "-s", "algorithm.kl_loss_coef=0.1")
    first, second = (line["metrics"] for line in steps(vision, "a"))
    assert abs(first["train/kl_loss"]) < 1e-6 < second["train/kl_loss"]
    assert (first["rollout/staleness/max"], second["rollout/staleness/max"]) == (0, 1)
    assert first["train/train_rollout_logprob_abs_diff"] < 1e-5
    sft = ("--algorithm", "sft", "--model", str(vision.model), "-s", "run.rollout_batch_size=8")
    reports = vision.slimectl("train", "prompts.jsonl", *sft, "-s", "train.lr=0.01", "-s", "train.lr_warmup_iters=0")
    assert json.loads(reports)["metrics"]["train/loss"] > 0


def test_what_reads_no_images_says_so_before_it_works(vision: Workshop, model: Path):
    row = json.dumps({"prompt": "<image>?", "images": ["missing.png"]}) + "\n"
    (vision.folder / "prompts.jsonl").write_text(row)
    vision.slimectl("rollout", "-c", "slimectl.toml", code=3)
    assert "missing.png: the image cannot be read: No such file" in vision.stderr
    vision.slimectl("run", "--backend", "megatron", code=2)
    family = json.loads((model / "config.json").read_text())["model_type"]
    assert f'train.backend: "megatron" does not train {family}' in vision.stderr
    assert not (vision.folder / "runs").exists()


@pytest.mark.parametrize("engine", ["engine.backend=sglang", "engine.backend=vllm", "engine.num_engines=2"])
def test_images_for_servers_are_refused_before_a_server_starts(vision: Workshop, engine: str):
    (vision.folder / "prompts.jsonl").write_text(
        '{"prompt": "And without?", "label": "b"}\n{"prompt": "<image>What?", "images": ["images/0.png"]}\n'
    )
    message = (
        "slimectl: prompts.jsonl:2: images: engine servers do not read images. "
        'Use one embedded engine (engine.backend = "embedded", engine.num_engines = 1, cluster.executor = "local"), '
        "or drop the row.\n"
    )
    vision.slimectl("rollout", "-c", "slimectl.toml", "-s", engine, code=3)
    assert vision.stderr == message
    checked = vision.slimectl("rollout", "-c", "slimectl.toml", "-s", engine, "--dry-run", code=3)
    assert b"images: engine servers do not read images" in checked
    vision.slimectl("eval", "-c", "slimectl.toml", "-s", engine, code=3)
    assert vision.stderr == message
    vision.slimectl("run", "-s", engine, code=3)
    assert vision.stderr.endswith(message)
    assert not (vision.folder / "runs").exists()
