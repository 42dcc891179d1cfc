"""reasoning_gym tasks as environments of one turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimectl.agents.environments.port import Action, Environment, Observation, Task
from slimectl.rewards.reasoning_gym import ReasoningGym
from slimectl.types import Sample


class ReasoningGymTasks(Environment):
    """The data set `reasoning_gym.create_dataset(NAME, **arguments)`. The split `eval` has another seed.

    The task's own scorer grades the last <answer> tag, or else the whole answer. The guards of the verifier
    reasoning_gym apply, because some scorers evaluate their input. `instruction` is put before the question.
    """

    tasks = "rows"

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        import reasoning_gym

        arguments = {"seed": 0, **arguments}
        self._name = target
        self._instruction = str(arguments.pop("instruction", ""))
        held_out = arguments | {"seed": int(arguments["seed"]) + 1_000_000}
        create = reasoning_gym.create_dataset
        self._sets = {"train": create(target, **arguments), "eval": create(target, **held_out)}

    def count(self, split: str) -> int:
        return len(self._sets[split])

    def reset(self, task: Task) -> Observation:
        self._entry = self._sets[task.split][task.index or 0]
        text = "\n\n".join(filter(None, (self._instruction, self._entry["question"])))
        return Observation([{"role": "user", "content": text}])

    def step(self, action: Action) -> Observation:
        metadata = {"source_dataset": self._name, "entry": self._entry}
        sample = Sample(prompt=self._entry["question"], response=action.text, label=str(self._entry["answer"]))
        sample.metadata = metadata
        grade = ReasoningGym().explain(sample)
        info = {"answer": str(self._entry["answer"])[:1000], "explanation": grade.why}
        return Observation(rewards={0: grade.reward}, is_done=True, info=info)
