"""Environments of each ecosystem: rewards equal to its own loop, its tools, and its refusals in one line."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents.sessions import ScriptedEngine, call_text, merging_tokenizer
from environments.equality import CASES, own_rewards, python_of, rewards_of

from slimectl.agents.environments.agent import EnvironmentAgent, EnvironmentOptions, specification_of
from slimectl.agents.environments.episode import EnvironmentHost
from slimectl.errors import SlimectlError
from slimectl.types import Sample, SamplingParams

pytestmark = pytest.mark.slow

SERVERS = Path(__file__).parent / "servers"


def python_with(kind: str) -> str:
    python = python_of(kind)
    if python is None:
        pytest.skip(f"needs {kind}: tests/environments/requirements.txt in a Python that ENVIRONMENTS_PYTHON names")
    return python


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find modules of environments as a user's are found: in the working folder."""
    monkeypatch.chdir(SERVERS)


QUICK = [
    case for case in CASES if not case[0].endswith(("CartPole-v1", "Blackjack-v1", "FrozenLake-v0", "KuhnPoker-v0"))
]


@pytest.mark.parametrize(("name", "arguments"), QUICK, ids=[name for name, _ in QUICK])
def test_rewards_are_those_of_the_ecosystem_s_own_loop(name: str, arguments: dict[str, Any]):
    python = python_with(name.partition(":")[0])
    rewards = rewards_of(name, arguments, 8, python)
    assert rewards == own_rewards(name, arguments, 8, python)
    assert len({tuple(by_player) for by_player in rewards}) > 1 or name == "gymnasium:FrozenLake-v1"


@pytest.fixture
def guess_server() -> Iterator[str]:
    with listening("openenv", "guess_server.py") as address:
        yield address


class listening:
    """A server of a file, on a free port, until the end of the block."""

    def __init__(self, kind: str, file: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen([python_with(kind), str(SERVERS / file), str(self.port)])

    def __enter__(self) -> str:
        while socket.socket().connect_ex(("127.0.0.1", self.port)):
            assert self.process.poll() is None
            time.sleep(0.05)
        return f"http://127.0.0.1:{self.port}"

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def test_rewards_of_an_openenv_server_are_those_of_its_own_client(guess_server: str):
    rewards = rewards_of(f"openenv:{guess_server}", {}, 8)
    assert rewards == own_rewards(f"openenv:{guess_server}", {}, 8, python_with("openenv"))
    assert len({reward for [reward] in rewards}) > 1


def play(name: str, answers: list[str], sample: Sample, **options: Any) -> Sample:
    tokenizer = merging_tokenizer()
    engine = ScriptedEngine([[*tokenizer.encode(text), tokenizer.eos_token_id] for text in answers], tokenizer)
    agent = EnvironmentAgent(EnvironmentOptions(specification_of(name, **options)))
    arguments = {"sample": sample, "tokenizer": tokenizer, "context": None, "generate": engine.generate,
                 "sampling_params": SamplingParams(max_tokens=10_000)}  # fmt: skip
    [played] = asyncio.run(agent(arguments))
    return played


CALLS = [call_text("add", a=3, b=4), call_text("fail"), call_text("nope"), call_text("add", a="x"), "it is 7"]


@pytest.mark.parametrize("transport", ["command", "address"])
def test_tools_of_an_mcp_server_are_called_and_their_errors_are_words_for_the_policy(transport: str):
    python, sample = python_with("mcp"), Sample(prompt="3 + 4?", label="7")
    if transport == "command":
        name, arguments = f"mcp:{python} tool_server.py", {"tools": ["add", "fail"]}
        played = play(name, CALLS, sample, arguments=arguments, python=python)
    else:
        with listening("mcp", "tool_server.py") as address:
            played = play(f"mcp:{address}/mcp", CALLS, sample, arguments={"headers": {"X-Key": "1"}}, python=python)
    report = played.metadata["env"]
    assert (played.reward, report["turns"], report["tool_calls"], report["errors"]) == (None, 5, 4, 3)
    results = [part.split("<")[0].strip() for part in played.response.split("tool\n")[1:]]
    assert results[0].startswith("7")
    assert "fail" in results[1]
    assert "nope" in results[2]
    assert "valid integer" in results[3]


def test_observations_of_gymnasium_are_text_and_actions_are_read_from_text():
    python = python_with("gymnasium")
    arguments = {"is_slippery": False, "actions": ["left", "down", "right", "up"]}
    task = Sample(metadata={"env": {"task": 0, "split": "train"}})
    words = ["down", "<action>down</action>, not up", "I go right", "fly", "down", "right", "right"]
    sample = play("gymnasium:FrozenLake-v1", words, task, arguments=arguments, python=python)
    assert sample.prompt[0]["content"] == (
        "Answer with one action: left, down, right, up.\n\n0\n\n[S]FFF\nFHFH\nFFFH\nHFFG"
    )  # fmt: skip
    assert (sample.reward, sample.metadata["env"]["turns"], sample.metadata["env"]["errors"]) == (1.0, 7, 1)
    assert "9\n\n  (Right)\nSFFF\nFHFH\nF[F]FH\nHFFG" in sample.response


def test_bad_names_and_arguments_are_one_line_each():
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("gymnasium:FrozenLak-v1", {}, "FrozenLak"),
        ("gymnasium:FrozenLake-v1", {"actions": ["a"]}, "actions: 1 names for the action space Discrete"),
        ("textarena:Nothing-v0", {}, "Nothing-v0"),
        ("verifiers:no-such-env", {}, "no-such-env"),
        ("mcp:no-such-command", {}, "no-such-command"),
        ("mcp:true", {"tool": []}, "env_args: tool is none of cwd, env, headers, tools"),
    ]
    for name, arguments, message in cases:
        if (python := python_of(name.partition(":")[0])) is not None:
            with pytest.raises(SlimectlError) as caught:
                EnvironmentHost(specification_of(name, arguments, python)).description()
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
    with pytest.raises(SlimectlError, match=r"openenv:http://127\.0\.0\.1:9: ClientConnectorError"):
        EnvironmentHost(specification_of("openenv:http://127.0.0.1:9", {})).description()
