"""Rewards by each ecosystem's own loop, with a scripted policy: run by the Python that has the ecosystem.

    python own_runners.py KIND ID ARGUMENTS EPISODES

prints a JSON list with the rewards of each seed or row, a list of them by player. The policy knows the number of the
task and of the turn alone, so that it answers alike wherever it is asked.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable
from typing import Any

Answer = tuple[str, dict[str, Any] | None]
"""Text, and the arguments of a call of the tool `add`."""


def drawn(task: int, turn: int) -> random.Random:
    return random.Random(1000 * task + turn)


def number(low: int, high: int, form: str = "{}") -> Callable[[int, int], Answer]:
    """Return a policy that names a number of this range."""
    return lambda task, turn: (form.format(drawn(task, turn).randrange(low, high)), None)


def word(*words: str) -> Callable[[int, int], Answer]:
    """Return a policy that says one of these words."""
    return lambda task, turn: (drawn(task, turn).choice(words), None)


def sum_or_near(task: int, turn: int) -> Answer:
    """Name the sum of a row of sums_env, or a number near it; half of the time be sure."""
    draw = drawn(task, turn)
    return f"{2 * task + draw.randrange(3)}{draw.choice(['', ' sure'])}", None


def sum_by_tool(task: int, turn: int) -> Answer:
    """Call the tool of tool_env, then name what it gives or ought to."""
    near = task + drawn(task, 0).randrange(3)
    return (f"it is {task + near}", None) if turn else ("", {"a": task, "b": near})


POLICIES: dict[str, Callable[[int, int], Answer]] = {
    "gymnasium:FrozenLake-v1": number(0, 4),
    "gymnasium:CartPole-v1": number(0, 2),
    "gymnasium:Blackjack-v1": number(0, 2, "I say {}"),
    "gymnasium:Pendulum-v1": number(-2, 3, "[{}]"),
    "textarena:GuessTheNumber-v0": number(1, 21, "[{}]"),
    "textarena:TicTacToe-v0": number(0, 9, "[{}]"),
    "textarena:FrozenLake-v0": word("[up]", "[down]", "[left]", "[right]"),
    "textarena:KuhnPoker-v0": word("[check]", "[bet]", "[fold]", "[call]"),
    "verifiers:sums-env": sum_or_near,
    "verifiers:tool-env": sum_by_tool,
    "openenv:": number(0, 10),
}


def answer_of(name: str, task: int, turn: int, label: str = "") -> Answer:
    """Return the scripted answer; that to reasoning_gym is right, right in a tag, wrong or empty, in turn."""
    if name.startswith("reasoning_gym:"):
        forms = ("{}", "so: <answer>{}</answer>", "<answer>{}0</answer>", "<answer></answer>")
        return forms[task % 4].format(label), None
    return next(policy for key, policy in POLICIES.items() if name.startswith(key))(task, turn)


def gymnasium_rewards(target: str, arguments: dict[str, Any], episodes: int) -> list[list[float]]:
    import gymnasium
    import numpy

    env, rewards = gymnasium.make(target, **arguments), []
    for seed in range(episodes):
        env.reset(seed=seed)
        total, turn, over = 0.0, 0, False
        while not over:
            text = answer_of(f"gymnasium:{target}", seed, turn)[0]
            numbers = json.loads(text) if text.startswith("[") else int(text.split()[-1])
            action = numpy.array(numbers, dtype=env.action_space.dtype) if text.startswith("[") else numbers
            _, reward, terminated, truncated, _ = env.step(action)
            total, turn, over = total + float(reward), turn + 1, terminated or truncated
        rewards.append([total])
    return rewards


def textarena_rewards(target: str, arguments: dict[str, Any], episodes: int) -> list[list[float]]:
    import textarena

    players = {"TicTacToe-v0": 2, "KuhnPoker-v0": 2}.get(target, 1)
    rewards = []
    for seed in range(episodes):
        env = textarena.make(target, **arguments)
        env.reset(num_players=players, seed=seed)
        turn, is_done, acted = 0, False, set()
        while not is_done:
            acted.add(env.get_observation()[0])
            is_done, _ = env.step(action=answer_of(f"textarena:{target}", seed, turn)[0])
            turn += 1
        final, _ = env.close()
        rewards.append([float(final[player]) for player in sorted(acted)])
    return rewards


def reasoning_gym_rewards(target: str, arguments: dict[str, Any], episodes: int) -> list[list[float]]:
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    dataset = reasoning_gym.create_dataset(target, **{"seed": 0, **arguments})
    rewards = []
    for row in range(episodes):
        entry = dataset[row]
        text = answer_of(f"reasoning_gym:{target}", row, 0, str(entry["answer"]))[0]
        answer = extract_answer(text) if "<answer>" in text else text
        rewards.append([float(dataset.score_answer(answer, entry))])
    return rewards


def verifiers_rewards(target: str, arguments: dict[str, Any], episodes: int) -> list[list[float]]:
    import httpx
    import openai
    import verifiers
    from verifiers.clients import OpenAIChatCompletionsClient

    class Policy(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            messages = json.loads(await request.aread())["messages"]
            task = int(messages[0]["content"].split()[0])
            turn = sum(message["role"] == "assistant" for message in messages)
            text, call = answer_of(f"verifiers:{target}", task, turn)
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if call:
                function = {"name": "add", "arguments": json.dumps(call)}
                message["tool_calls"] = [{"id": f"call{turn}", "type": "function", "function": function}]
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if call else "stop"}
            body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
            return httpx.Response(200, json=body | {"usage": usage}, request=request)

    client = openai.AsyncOpenAI(api_key="x", http_client=httpx.AsyncClient(transport=Policy()))
    env = verifiers.load_environment(target, **arguments)
    rows = [dict(row) for row in env.get_dataset(n=episodes)]
    results = asyncio.run(env.generate(rows, client=OpenAIChatCompletionsClient(client), model="m"))
    by_row = {output["example_id"]: output["reward"] for output in results["outputs"]}
    return [[float(by_row[row["example_id"]])] for row in rows]


def openenv_rewards(target: str, arguments: dict[str, Any], episodes: int) -> list[list[float]]:
    from openenv.core.generic_client import GenericEnvClient

    async def episode(seed: int) -> list[float]:
        async with GenericEnvClient(base_url=target) as env:
            await env.reset(seed=seed)
            total, turn, over = 0.0, 0, False
            while not over:
                result = await env.step({"guess": int(answer_of("openenv:", seed, turn)[0])})
                total, turn, over = total + (result.reward or 0.0), turn + 1, result.done
            return [total]

    async def play() -> list[list[float]]:
        return [await episode(seed) for seed in range(episodes)]

    return asyncio.run(play())


RUNNERS = {
    "gymnasium": gymnasium_rewards, "textarena": textarena_rewards, "reasoning_gym": reasoning_gym_rewards,
    "verifiers": verifiers_rewards, "openenv": openenv_rewards,
}  # fmt: skip

if __name__ == "__main__":
    kind, target, arguments, episodes = sys.argv[1:]
    results = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no result
    print(json.dumps(RUNNERS[kind](target, json.loads(arguments), int(episodes))), file=results)
