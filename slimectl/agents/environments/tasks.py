"""Tasks of an environment as a source of prompts: `env`, `env:eval`, and slices of them."""

from __future__ import annotations

from slimectl.agents.environments.episode import Specification, shared_host
from slimectl.data.tables import Listed, Sliced, Table
from slimectl.errors import SettingsError
from slimectl.types import Prompt

EPOCH = {"train": 1000, "eval": 100}
"""Number of tasks of `env` and `env:eval` if every seed is a task. A slice can select others."""
SEEDS = 1_000_000_000
"""Seeds of a split."""


def task_table(specification: Specification, split: str, *, unbounded: bool) -> Table:
    """Return the tasks of a split, `unbounded` for its slices. Raises SlimectlError if it cannot be loaded."""
    description, name = shared_host(specification).description(), specification.name

    def prompt(task: int) -> Prompt:  # empty, because the environment writes the first message of an episode
        return Prompt("", metadata={"env": {"task": task, "split": split}})

    if description["tasks"] == "data":
        raise SettingsError(f"{name}: has no tasks of its own. Give a file of prompts as data: --data tasks.jsonl.")
    if description["tasks"] == "seeds":
        table = Listed(name, range(SEEDS), prompt)
        return table if unbounded else Sliced(name, table, 0, EPOCH[split])
    if not description["counts"][split]:
        raise SettingsError(f"{name}: has no tasks for {split}. Give slices of env, such as env@[0:100].")
    return Listed(name, range(description["counts"][split]), prompt)
