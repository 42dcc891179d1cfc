"""Rewards of an environment played through slimectl and by its ecosystem's own loop, with one scripted policy."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from agents.sessions import call_text, merging_tokenizer
from environments.own_runners import answer_of

from slimectl.agents.environments.agent import EnvironmentAgent, EnvironmentOptions, specification_of
from slimectl.types import Completion, Sample, SamplingParams

HERE = Path(__file__).parent
CASES = (
    ("gymnasium:FrozenLake-v1", {"is_slippery": True}),
    ("gymnasium:CartPole-v1", {}),
    ("gymnasium:Blackjack-v1", {}),
    ("gymnasium:Pendulum-v1", {"max_episode_steps": 20}),
    ("textarena:GuessTheNumber-v0", {}),
    ("textarena:TicTacToe-v0", {}),
    ("textarena:FrozenLake-v0", {}),
    ("textarena:KuhnPoker-v0", {}),
    ("reasoning_gym:chain_sum", {}),
    ("verifiers:sums-env", {"count": 200}),
    ("verifiers:tool-env", {"count": 200}),
)
"""Environments by name, with their arguments."""


def own_rewards(name: str, arguments: dict[str, Any], episodes: int, python: str) -> list[list[float]]:
    """Return the rewards by the ecosystem's own loop, by player."""
    kind, _, target = name.partition(":")
    words = [python, str(HERE / "own_runners.py"), kind, target, json.dumps(arguments), str(episodes)]
    environment = os.environ | {"PYTHONPATH": str(HERE / "servers")}
    output = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert output.returncode == 0, output.stderr[-2000:]
    rewards: list[list[float]] = json.loads(output.stdout.splitlines()[-1])
    return rewards


def rewards_of(name: str, arguments: dict[str, Any], episodes: int, python: str | None = None) -> list[list[float]]:
    """Return the rewards of episodes that are played through slimectl, by player."""
    tokenizer = merging_tokenizer()
    options = EnvironmentOptions(specification_of(name, arguments, python), max_turns=1000, concurrency=16)
    agent = EnvironmentAgent(options)

    async def episode(number: int) -> list[float]:
        turns = 0

        async def generate(tokens: list[int], params: SamplingParams) -> Completion:
            nonlocal turns
            text, call = answer_of(name, number, turns, labels[number])
            turns += 1
            answer = [*tokenizer.encode(call_text(**call) if call else text), tokenizer.eos_token_id]
            return Completion(answer, [-1.0] * len(answer), call_text(**call) if call else text, "stop")

        sample = Sample(index=number, metadata={"env": {"task": number, "split": "train"}})
        samples = await agent({
            "sample": sample, "tokenizer": tokenizer, "context": None, "generate": generate,
            "sampling_params": SamplingParams(max_tokens=10**6),
        })  # fmt: skip
        players: dict[int, float] = defaultdict(float)
        for branch in samples:
            players[branch.metadata["env"].get("player", 0)] = branch.reward
        return [players[player] for player in sorted(players)]

    async def play() -> list[list[float]]:
        return await asyncio.gather(*map(episode, range(episodes)))

    labels = _labels(name, arguments, episodes)
    return asyncio.run(play())


def _labels(name: str, arguments: dict[str, Any], episodes: int) -> list[str]:
    """Return the right answers, which the policy knows in reasoning_gym."""
    kind, _, target = name.partition(":")
    if kind != "reasoning_gym":
        return [""] * episodes
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(target, **{"seed": 0, **arguments})
    return [str(dataset[row]["answer"]) for row in range(episodes)]


def python_of(kind: str) -> str | None:
    """Return the Python that has an ecosystem: this one, or that of ENVIRONMENTS_PYTHON; None without one."""
    from importlib.util import find_spec

    if find_spec({"openenv": "openenv", "mcp": "mcp"}.get(kind, kind)) is not None:
        return sys.executable
    return os.environ.get("ENVIRONMENTS_PYTHON")
