"""Recipes for GPUs: their settings are valid and fit, and the guide has the figures of the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimectl import recipes
from slimectl.cli.app import app

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
