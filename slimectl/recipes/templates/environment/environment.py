"""An environment of your own: a corridor of five places. Letters before n lead left, the others right.

slimectl rollout --env python:environment.py:Corridor --model tiny -n 1

A new model of 0.9 M parameters learns to reach the right end from rewards only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from slimectl.agents.environments.port import Action, Environment, Observation, Task

PLACES = 5


class Corridor(Environment):
    """Walk to the right end. A step towards it gives 0.25, a step back takes as much, another answer gives nothing."""

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        """Prepare what episodes share. `arguments` are those of rollout.env_args."""
        self.place = 0

    def reset(self, task: Task) -> Observation:
        """Begin an episode. Equal seeds begin equal episodes."""
        self.place = random.Random(task.seed).randrange(2)
        return Observation([self._seen()])

    def step(self, action: Action) -> Observation:
        """Return what the model reads next, the reward of its action for player 0, and whether the episode ends."""
        letter = action.text.strip()[:1].lower()
        if not ("a" <= letter <= "z"):
            return Observation([self._seen()], {0: 0.0}, is_error=True)
        before, self.place = self.place, max(0, self.place + (1 if letter >= "n" else -1))
        return Observation([self._seen()], {0: 0.25 * (self.place - before)}, is_done=self.place == PLACES - 1)

    def _seen(self) -> dict[str, str]:
        return {"role": "user", "content": "." * self.place + "o" + "." * (PLACES - 1 - self.place)}
