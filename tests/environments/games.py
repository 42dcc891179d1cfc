"""Small environments for tests: a guessing game, and ones that hang, die, raise or say odd things."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimectl.agents.environments.port import Action, Environment, Observation, Task


class Guess(Environment):
    """Guess a number below `high`: a reward of 1 for it, of 0.1 for every other guess that is a number.

    The number is drawn from the global random numbers, as by libraries that seed those.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        self.high = arguments.get("high", 10)

    def reset(self, task: Task) -> Observation:
        random.seed(task.seed)
        self.number = random.randrange(self.high)
        return Observation([{"role": "user", "content": f"a number below {self.high}?"}])

    def step(self, action: Action) -> Observation:
        random.random()  # what another episode draws changes nothing here
        if not action.text.strip().isdigit():
            return Observation([{"role": "user", "content": "no number"}], {0: 0.0}, is_error=True)
        if int(action.text) == self.number:
            return Observation(rewards={0: 1.0}, is_done=True, info={"number": self.number})
        hint = "more" if int(action.text) < self.number else "less"
        return Observation([{"role": "user", "content": hint}], {0: 0.1})

    def close(self) -> Observation:
        return Observation(rewards={0: 0.5}, is_done=True)


class Troubled(Environment):
    """Does as the argument `first` says in the first episode, and as `then` says in all others."""

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        if arguments.get("first") == "refuse":
            raise ValueError("no such level")

    def reset(self, task: Task) -> Observation:
        log = Path(self.arguments["log"])
        # Created by one episode only: two may begin at once.
        is_first = True
        try:
            log.touch(exist_ok=False)
        except FileExistsError:
            is_first = False
        with log.open("a") as file:
            print(os.getpid(), file=file)
        self.deed = self.arguments["first" if is_first else "then"]
        return Observation([{"role": "user", "content": "go"}])

    def step(self, action: Action) -> Observation:
        if self.deed == "hang":
            time.sleep(600)
        if self.deed == "die":
            print("out of memory", flush=True)
            os._exit(3)
        if self.deed == "raise":
            raise RuntimeError("the board is broken\nin two")
        return Observation(rewards={0: 2.0}, is_done=True)


class Duel(Environment):
    """Two players name a letter each; the later one in the alphabet wins."""

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        self.letters: list[str] = []

    def reset(self, task: Task) -> Observation:
        return Observation([{"role": "user", "content": "your letter, first player"}], player=0)

    def step(self, action: Action) -> Observation:
        self.letters.append(action.text)
        if len(self.letters) == 1:
            return Observation([{"role": "user", "content": "your letter, second player"}], player=1)
        winner = self.letters.index(max(self.letters))
        return Observation(rewards={winner: 1.0, 1 - winner: -1.0}, is_done=True)


class Adder(Environment):
    """Has a tool that adds, rows of the user's as tasks, and no reward."""

    tasks = "data"
    gives_reward = False

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        self.tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    async def reset(self, task: Task) -> Observation:
        return Observation(task.messages, tools=[self.tool])

    async def step(self, action: Action) -> Observation:
        if not action.tool_calls:
            return Observation(is_done=True)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"called with {call['arguments']}"}
            for call in action.tool_calls
        ]
        return Observation(results)
