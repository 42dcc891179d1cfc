"""Recipes for GPUs: their settings are valid and fit, and the guide has the figures of the plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slimectl import recipes
from slimectl.cli.app import app
from slimectl.runtime.preflight import DATASETS, preflight
from slimectl.runtime.stage_functions import load_settings

FOLDER = Path(recipes.__file__).parent
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "recipes.md"
GPUS = {"qwen3-1.7b-lora-24gb": (24, 165)}  # an RTX 4090 in bfloat16, dense
H100 = (80, 989)
NAMES = sorted(file.stem for file in FOLDER.glob("qwen3-*.toml"))


def planned(name: str) -> dict[str, dict[str, float]]:
    """Return `slimectl plan` of a recipe: figures by section and name, and whether it fits."""
    memory, tflops = GPUS.get(name, H100)
    words = ["plan", "-c", str(FOLDER / f"{name}.toml"), "--gpu-memory", str(memory), "--tflops", str(tflops), "--json"]
    result = CliRunner().invoke(app, words, env={"HF_HUB_OFFLINE": "1"})
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    figures = {title: {row["name"]: row["value"] for row in rows} for title, rows in plan["sections"].items()}
    return figures | {"fits": plan["fits"]}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_and_the_guide_has_its_figures(name: str):
    memory, _ = GPUS.get(name, H100)
    figures = planned(name)
    assert figures["fits"] is True
    settings = recipes.find(name, instead=True, needed=True).layer.values
    engine = settings["sglang"]["args"]["mem_fraction_static"] * memory
    cells = [cell.strip() for cell in row_of(name).split("|")]
    assert cells[4] == f"{figures['training memory']['peak per rank'] / 2**30:.1f} GiB"
    assert cells[5] == f"{engine:.1f} GiB"
    assert cells[6] == f"{figures['arithmetic']['time per step']:.0f} s"
    if settings["cluster"].get("colocate"):
        assert figures["shared GPUs"]["peak of a push"] <= 0.95 * memory * 2**30


def row_of(name: str) -> str:
    return next(line for line in GUIDE.read_text().splitlines() if line.startswith(f"| `{name}` "))


def test_the_guide_lists_every_recipe():
    listed = [line.split("`")[1] for line in GUIDE.read_text().splitlines() if line.startswith("| `qwen3-")]
    assert sorted(listed) == NAMES
    assert len(NAMES) == 6


CHAT = [{"role": "user", "content": "Solve this. The last line is Answer: $Answer.\n\nWhat is 2+2?"}]
DAPO = {
    "data_source": "math_dapo", "prompt": CHAT, "ability": "MATH",
    "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b6eb4"},
}  # fmt: skip
PUBLISHED = {
    "openai/gsm8k": {"question": "Two and two?", "answer": "2+2 = <<2+2=4>>4 in all.\n#### 4"},
    "BytedTsinghua-SIA/DAPO-Math-17k": DAPO,
    "BytedTsinghua-SIA/AIME-2024": DAPO,
}
"""A row with the columns of each data set on the hub."""


@pytest.mark.parametrize("name", NAMES)
def test_the_columns_of_the_published_data_are_read_and_graded(name: str, tmp_path: Path, model_dir: Any):
    given = load_settings(name)
    files = {}
    for source in [*given.rollout.data, *given.eval.sources.values()]:
        published = next(repository for repository in PUBLISHED if source.startswith(repository))
        files[source] = tmp_path / f"{len(files)}.jsonl"
        files[source].write_text(json.dumps(PUBLISHED[published]) + "\n")
    data = {f"eval.data.{dataset}.path": str(files[source]) for dataset, source in given.eval.sources.items()}
    data |= {"rollout.data": [str(files[source]) for source in given.rollout.data]}
    model = Path(shutil.copytree(model_dir("qwen3"), tmp_path / "model"))
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if enable_thinking is false %}<think></think>{% endif %}")
    small = {"model.path": str(model), "rollout.max_prompt_len": None, "rollout.max_response_len": 8}
    if name not in ("qwen3-1.7b-lora-24gb", "qwen3-1.7b-h100"):
        small["eval.data.aime24.max_response_len"] = 8
    results = list(preflight(load_settings(name, {**data, **small}), ["data", "reward", DATASETS]))
    assert len(results) == 4
    assert [result for result in results if not result.fine] == []
