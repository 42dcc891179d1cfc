"""Tasks of an environment as a source of prompts: `env`, `env:eval`, and slices of them."""

from __future__ import annotations

from collections.abc import Iterator

from slimectl.agents.environments.episode import Specification, shared_host
from slimectl.data.tables import Row, Sliced, Table
from slimectl.errors import SettingsError
from slimectl.types import Prompt

EPOCH = {"train": 1000, "eval": 100}
"""Number of tasks of `env` and `env:eval` if every seed is a task. A slice can select others."""
SEEDS = 1_000_000_000
"""Seeds of a split."""


class TaskTable:
    """Tasks by number. Their prompts are empty, because the environment writes the first message of an episode."""

    def __init__(self, name: str, split: str, size: int) -> None:
        self._name, self._split, self._size = name, split, size

    def scan(self, start: int = 0) -> Iterator[Row]:
        return (self[i] for i in range(start, len(self)))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Row:
        return f"{self._name}[{i}]", Prompt("", metadata={"env": {"task": i, "split": self._split}})


def task_table(specification: Specification, split: str, *, unbounded: bool) -> Table:
    """Return the tasks of a split, `unbounded` for its slices. Raises SlimectlError if it cannot be loaded."""
    description, name = shared_host(specification).description(), specification.name
    if description["tasks"] == "data":
        raise SettingsError(f"{name}: has no tasks of its own. Give a file of prompts as data: --data tasks.jsonl.")
    if description["tasks"] == "seeds":
        table = TaskTable(name, split, SEEDS)
        return table if unbounded else Sliced(name, table, 0, EPOCH[split])
    if not description["counts"][split]:
        raise SettingsError(f"{name}: has no tasks for {split}. Give slices of env, such as env@[0:100].")
    return TaskTable(name, split, description["counts"][split])
