"""A file says what made it, and is not made again without need."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from workshop import Workshop

pytestmark = pytest.mark.slow

ROLLOUT = ("rollout", "-c", "slimectl.toml", "--out", "samples.jsonl")
SCORE = ("score", "samples.jsonl", "-c", "slimectl.toml", "--out", "scored.jsonl")


def manifest(path: Path) -> dict:
    return json.loads(path.with_name(path.name + ".manifest.json").read_text())


def test_a_manifest_says_what_made_the_file_from_what(workshop: Workshop):
    workshop.slimectl(*ROLLOUT)
    workshop.slimectl(*SCORE)
    sampled, scored = (manifest(workshop.folder / name) for name in ("samples.jsonl", "scored.jsonl"))
    assert (sampled["stage"], scored["stage"]) == ("rollout", "score")
    assert sampled["settings"]["rollout"]["n_samples_per_prompt"] == 4
    assert sampled["counts"]["out"] == scored["counts"]["out"] == 32
    prompts, samples = workshop.folder / "prompts.jsonl", workshop.folder / "samples.jsonl"
    assert sampled["inputs"]["prompts.jsonl"] == hashlib.sha256(prompts.read_bytes()).hexdigest()
    assert set(sampled["inputs"]) == {"prompts.jsonl", "reward.py", str(workshop.model)}
    assert set(scored["inputs"]) == {"samples.jsonl", "reward.py"}
    assert scored["inputs"]["samples.jsonl"] == hashlib.sha256(samples.read_bytes()).hexdigest()
    assert scored["parents"] == ["samples.jsonl.manifest.json"]
    assert sampled["started"] <= sampled["finished"] <= scored["finished"]

    words = workshop.slimectl("inspect", "scored.jsonl", "--rows", "1").decode()
    assert words.startswith("scored.jsonl: 32 samples of 8 prompts, mean reward ")
    assert "stage score" in words
    assert f"started {scored['started']}" in words
    assert "parents ['samples.jsonl.manifest.json']" in words
    assert f"input samples.jsonl sha256 {scored['inputs']['samples.jsonl'][:16]}" in words


def test_a_file_is_made_again_when_it_or_what_made_it_changed_or_by_force_only(workshop: Workshop):
    workshop.slimectl(*ROLLOUT)
    samples, scored = workshop.folder / "samples.jsonl", workshop.folder / "scored.jsonl"

    def made_again(*more: str) -> bool:
        before = scored.stat().st_ino if scored.exists() else None
        workshop.slimectl(*SCORE, *more)
        same = "is up to date with these inputs and settings. Use --force to write it again." in workshop.stderr
        assert same == (scored.stat().st_ino == before), workshop.stderr
        return not same

    assert made_again()
    first = scored.read_bytes()
    assert not made_again()
    assert made_again("--force")
    assert scored.read_bytes() == first
    assert made_again("-s", "score.timeout_s=9")
    assert not made_again("-s", "score.timeout_s=9")
    assert made_again()
    samples.write_bytes(b"".join(samples.read_bytes().splitlines(keepends=True)[:8]))
    assert made_again()
    assert scored.read_bytes() == b"".join(first.splitlines(keepends=True)[:8])
    scored.unlink()
    assert made_again()


def test_a_rollout_looks_at_its_prompts_and_its_model(workshop: Workshop):
    workshop.slimectl(*ROLLOUT)
    workshop.slimectl(*ROLLOUT)
    assert workshop.stderr.startswith("samples.jsonl: is up to date with these inputs and settings")
    with (workshop.folder / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "say nine", "label": "nine"}\n')
    workshop.slimectl(*ROLLOUT)
    assert manifest(workshop.folder / "samples.jsonl")["counts"]["out"] == 36


def test_a_changed_reward_function_is_another_input(workshop: Workshop):
    workshop.slimectl(*ROLLOUT)
    workshop.slimectl(*SCORE)
    (workshop.folder / "reward.py").write_text("def reward(sample):\n    return 0.75\n")
    workshop.slimectl(*SCORE)
    scored = (workshop.folder / "scored.jsonl").read_text().splitlines()
    assert {json.loads(line)["reward"] for line in scored} == {0.75}


def test_a_folder_of_weights_has_its_manifest_inside(workshop: Workshop):
    workshop.slimectl(*ROLLOUT)
    workshop.slimectl(*SCORE)
    train = ("train", "scored.jsonl", "-c", "slimectl.toml", "--save", "better")
    assert workshop.slimectl(*train).count(b"\n") == 2
    facts = json.loads((workshop.folder / "better" / "manifest.json").read_text())
    assert (facts["stage"], facts["counts"]) == ("train", {"steps": 2})
    assert "scored.jsonl.manifest.json" in facts["parents"]
    assert workshop.slimectl(*train) == b""
    assert "better: is up to date with these inputs and settings" in workshop.stderr
    words = workshop.slimectl("inspect", "better").decode()
    assert words.startswith("better: model_type llama")
    assert "stage train" in words
    assert "counts {'steps': 2}" in words
