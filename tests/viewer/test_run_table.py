"""The table of runs has the figures of its metrics, and groups runs by everything but their seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slimectl.cli.viewer.api import ViewApi
from slimectl.cli.viewer.library import Library
from slimectl.runtime.builders import tokenizer

LINES: list[tuple[int, dict[str, float]]] = [
    (0, {"eval/math_accuracy": 0.25}),
    (1, {"rollout/raw_reward": 0.5, "rollout/step": 1.0}),
    (1, {"eval/math_accuracy": 0.75}),
    (2, {"rollout/raw_reward": 0.25, "rollout/step": 2.0}),
    (2, {"eval/math_accuracy": 0.5}),
]


def add_run(folder: Path, name: str, seed: int, lr: float = 1e-3) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / "run.toml").write_text(
        f"[run]\nname = '{name}'\nseed = {seed}\nnum_rollout = 4\n[rollout]\nseed = {seed}\n"
        f"[sglang]\npython = '/opt/{name}/python'\n[track]\nwandb_group = '{name}'\n"
        f"[train]\nlr = {lr}\n[model]\npath = '/models/small'\n[algorithm]\nname = 'gspo'\n"
    )
    lines = [{"step": number, "rollout_id": number, "metrics": metrics} for number, metrics in LINES]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def table(folder: Path) -> tuple[ViewApi, dict[str, Any]]:
    api = ViewApi(Library([folder]), tokenizer)
    return api, api.answer("runs", {})


def test_a_row_has_last_and_best_figures_and_follows_its_run(tmp_path: Path):
    path = add_run(tmp_path, "a", 7)
    api, answer = table(tmp_path)
    (row,) = answer["runs"]
    shown = {name: row[name] for name in ("name", "state", "algorithm", "model", "rounds", "planned", "reward", "lr")}
    assert shown == {"name": "a", "state": "stopped", "algorithm": "gspo", "model": "/models/small", "rounds": 2,
                     "planned": 4, "reward": 0.25, "lr": 1e-3}  # fmt: skip
    assert row["best"] == {"eval/math_accuracy": (0.75, 1)}
    assert row["seeds"] == {"run.seed": 7, "rollout.seed": 7}
    with (path / "metrics.jsonl").open("a") as file:
        line = {"step": 3, "rollout_id": 3, "metrics": {"rollout/raw_reward": 0.875, "rollout/step": 3.0}}
        file.write(json.dumps(line) + "\n")
    (path / "manifest.json").write_text('{"finished": "now"}')
    (row,) = api.answer("runs", {})["runs"]
    assert (row["reward"], row["rounds"], row["state"]) == (0.875, 3, "finished")


def test_runs_that_differ_only_in_seeds_are_a_group(tmp_path: Path):
    for name, seed, lr in [("fast-s1", 1, 1e-3), ("fast-s2", 2, 1e-3), ("slow_seed1", 1, 1e-4),
                           ("slow_seed2", 2, 1e-4), ("alone", 1, 1e-2), ("x", 5, 5.0), ("y", 6, 5.0)]:  # fmt: skip
        add_run(tmp_path, name, seed, lr)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.toml").touch()
    _, answer = table(tmp_path)
    names = {row["id"]: row["name"] for row in answer["runs"]}
    groups = {group["name"]: [names[run] for run in group["runs"]] for group in answer["groups"]}
    assert groups == {"fast": ["fast-s1", "fast-s2"], "slow": ["slow_seed1", "slow_seed2"], "x": ["x", "y"]}
