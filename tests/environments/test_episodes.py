"""Episodes of an environment: played in a process each, recorded as sampled, and ended whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from agents.sessions import ScriptedEngine, call_text, merging_tokenizer

from slimectl.agents.environments.agent import EnvironmentAgent, EnvironmentOptions, specification_of
from slimectl.agents.environments.episode import EnvironmentHost, OutputTail
from slimectl.agents.environments.port import EVALUATION_SEEDS, Observation
from slimectl.agents.environments.verifiers import _check_version
from slimectl.errors import BackendError, RecordError, SettingsError, SlimectlError
from slimectl.runtime.builders.data import prompts
from slimectl.runtime.stage_functions import load_settings
from slimectl.types import Sample, SamplingParams, Status

GAMES = str(Path(__file__).parent / "games.py")


class Play:
    """Plays episodes with a policy that gives these answers, one after another."""

    def __init__(self) -> None:
        self.tokenizer = merging_tokenizer()
        self.engine: ScriptedEngine

    def agent(self, name: str, arguments: dict[str, Any], **options: Any) -> EnvironmentAgent:
        return EnvironmentAgent(EnvironmentOptions(specification_of(f"python:{GAMES}:{name}", arguments), **options))

    def __call__(
        self, agent: EnvironmentAgent, answers: list[str], sample: Sample | None = None, max_tokens: int = 400
    ) -> list[Sample]:
        tokens = [[*self.tokenizer.encode(answer), self.tokenizer.eos_token_id] for answer in answers]
        self.engine = ScriptedEngine(tokens, self.tokenizer)
        arguments = {
            "sample": sample or task(0), "tokenizer": self.tokenizer, "context": 1000,
            "generate": self.engine.generate, "sampling_params": SamplingParams(max_tokens=max_tokens),
        }  # fmt: skip
        return asyncio.run(agent(arguments))


@pytest.fixture(scope="module")
def play() -> Play:
    return Play()


@pytest.fixture(scope="module")
def guess(play: Play) -> EnvironmentAgent:
    return play.agent("Guess", {"high": 10})


def task(number: int, split: str = "train", **fields: Any) -> Sample:
    return Sample(metadata={"env": {"task": number, "split": split}}, **fields)


def number_of(seed: int) -> int:
    return random.Random(seed).randrange(10)


def wrong(seed: int) -> str:
    return str((number_of(seed) + 1) % 10)


def test_an_episode_is_a_chat_with_the_environment_whose_rewards_add_up(play: Play, guess: EnvironmentAgent):
    [sample] = play(guess, ["seven", wrong(3), str(number_of(3))], task(3, label="kept"))
    assert (sample.reward, sample.status, sample.label) == (pytest.approx(1.1), Status.COMPLETED, "kept")
    assert sample.prompt == [{"role": "user", "content": "a number below 10?"}]
    report = sample.metadata["env"]
    assert report["rewards"] == [0.0, 0.1, 1.0]
    assert {name: report[name] for name in ("task", "turns", "errors", "failures", "timeouts", "tool_calls")} == {
        "task": 3, "turns": 3, "errors": 1, "failures": 0, "timeouts": 0, "tool_calls": 0,
    }  # fmt: skip
    assert report["info"] == {"number": number_of(3)}
    assert sample.non_generation_time == report["seconds"] > 0


def test_tokens_are_those_that_were_sampled_and_only_they_are_taught(play: Play, guess: EnvironmentAgent):
    [sample] = play(guess, ["seven", "seven more", str(number_of(0))])
    answers = [answer for _, answer, _ in play.engine.log]
    start = sample.prompt_length
    spans = sample.metadata["agent"]["turns"]
    assert [sample.tokens[start + a : start + b] for a, b in spans] == answers
    assert sum(sample.loss_mask or []) == sum(map(len, answers))
    for prompt, answer, _ in play.engine.log:  # every request went on from all tokens before it
        assert sample.tokens[: len(prompt) + len(answer)] == prompt + answer


def test_a_turn_has_its_reward_and_the_state_it_was_taken_in(play: Play, guess: EnvironmentAgent):
    [sample] = play(guess, ["seven", wrong(3), wrong(3), str(number_of(3))], task(3))
    spans, turns = sample.metadata["agent"]["turns"], sample.turn_rewards or []
    assert [[turn["start"], turn["end"]] for turn in turns] == spans
    assert [(turn["turn"], turn["reward"]) for turn in turns] == [(0, 0.0), (1, 0.1), (2, 0.1), (3, 1.0)]
    first, after_error, hinted, again = (turn["state"] for turn in turns)
    assert first == after_error  # an invalid action changes no state
    assert hinted == again != first  # the same hint
    [other] = play(guess, [str(number_of(5))], task(5))
    assert (other.turn_rewards or [])[0]["state"] == first  # the same words, in another episode


def test_an_environment_may_name_its_states_and_long_ones_are_hashed():
    named = Observation([{"role": "user", "content": "you are in room 3"}], state="room 3")
    assert named.state_key() == "room 3"
    assert Observation.read({"messages": [], "state": "room 3"}).state_key() == "room 3"
    long = Observation(state="x" * 33)
    assert len(long.state_key()) == 16
    assert long.state_key() != Observation(state="x" * 34).state_key()


def test_players_of_a_game_have_turns_of_their_own(play: Play):
    second, first = play(play.agent("Duel", {}), ["a", "b"])
    # Both rewards come after the second player's move, and each goes to the player's own last turn.
    assert [(turn["turn"], turn.get("player", 0), turn["reward"]) for turn in first.turn_rewards or []] == [
        (0, 0, -1.0)
    ]
    assert [(turn["turn"], turn.get("player", 0), turn["reward"]) for turn in second.turn_rewards or []] == [
        (0, 1, 1.0)
    ]


def test_the_seed_alone_decides_an_episode_whatever_others_draw(play: Play, guess: EnvironmentAgent):
    async def together() -> list[list[Sample]]:
        engine = ScriptedEngine([[*play.tokenizer.encode("x"), play.tokenizer.eos_token_id]], play.tokenizer)
        return await asyncio.gather(*(guess(arguments(engine, task(seed))) for seed in [1, 2, 1, 2]))

    def arguments(engine: ScriptedEngine, sample: Sample) -> dict[str, Any]:
        return {"sample": sample, "tokenizer": play.tokenizer, "context": 400, "generate": engine.generate,
                "sampling_params": SamplingParams(max_tokens=60)}  # fmt: skip

    asyncio.run(together())
    for seed in (1, 2, 1):
        [sample] = play(guess, [str(number_of(seed))], task(seed))
        assert sample.reward == 1.0
    [held_out] = play(guess, [str(number_of(EVALUATION_SEEDS + 1))], task(1, "eval"))
    assert held_out.reward == 1.0


@pytest.mark.parametrize(
    ("limits", "turns"), [({"max_turns": 2}, 2), ({"turn_tokens": 1}, 64), ({}, 11)], ids=["turns", "turn", "response"]
)
def test_a_limit_ends_an_episode_with_the_rewards_so_far(play: Play, limits: dict[str, Any], turns: int):
    agent = play.agent("Guess", {"high": 10}, concurrency=1, **limits)
    [sample] = play(agent, [f"{wrong(0)}"], max_tokens=4000 if limits else 150)
    report = sample.metadata["env"]
    assert sample.status is Status.TRUNCATED
    assert report["turns"] <= turns
    assert sample.reward == pytest.approx(0.1 * (report["turns"] - 1) + 0.5)  # the last one's is that of the end


def living(pids: Iterable[int]) -> list[psutil.Process]:
    """Those of the processes that have not ended."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("hang", r"took more than rollout.env_timeout_s: 6 s in step"),
        ("die", r"died in step: .*process has ended: out of memory"),
        ("raise", r"failed in step: RuntimeError: the board is broken in two"),
    ],
)
def test_an_episode_that_its_environment_breaks_off_is_played_again_and_its_process_is_gone(
    play: Play, tmp_path: Path, deed: str, message: str
):
    arguments = {"log": str(tmp_path / "log"), "first": deed, "then": "win"}
    timeout_s = 6.0 if deed == "hang" else 60
    [sample] = play(play.agent("Troubled", arguments, timeout_s=timeout_s), ["x"])
    report = sample.metadata["env"]
    assert (sample.reward, sample.status) == (2.0, Status.COMPLETED)
    assert (report["failures"], report["timeouts"], report["turns"]) == (1, deed == "hang", 1)
    assert [end - start for start, end in sample.metadata["agent"]["turns"]] == [2]  # of the second episode alone
    again = task(0)
    agent = play.agent("Troubled", arguments | {"then": deed}, timeout_s=timeout_s, retries=0)
    with pytest.raises(RuntimeError, match=message):
        play(agent, ["x"], again)
    assert (again.metadata["env"]["failures"], again.metadata["env"]["timeouts"]) == (1, deed == "hang")
    pids = [int(pid) for pid in (tmp_path / "log").read_text().split()]
    assert len(pids) == 3
    assert psutil.wait_procs(living(pids), timeout=300)[1] == []


def test_the_end_of_an_output_is_all_that_was_written_by_now():
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as stream:
        output = OutputTail(stream)
        for i in range(500):
            os.write(writing, f"line {i}\n".encode())
            assert output.text().endswith(f"line {i}\n")
        os.write(writing, b"x" * 10_000)  # more than is kept; no writer waits
        assert output.text() == "x" * 4000
        os.close(writing)


@pytest.mark.slow
def test_a_host_ends_with_its_process_and_leaves_no_files(play: Play, tmp_path: Path):
    lines = f"""
    import sys, os, signal
    from slimectl.agents.environments.agent import specification_of
    from slimectl.agents.environments.episode import EnvironmentHost
    host = EnvironmentHost(specification_of("python:{GAMES}:Guess", {{}}))
    host.description()
    print(host._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", textwrap.dedent(lines)]
    output = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    host = int(output.stdout)
    assert psutil.wait_procs(living([host]), timeout=3000)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_the_example_of_the_documentation_plays(play: Play, tmp_path: Path):
    page = Path(__file__).parents[2] / "docs" / "environments.md"
    code = page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "guess.py").write_text(code)
    name = f"python:{tmp_path / 'guess.py'}:Guess"
    agent = EnvironmentAgent(EnvironmentOptions(specification_of(name, {"high": 20})))
    number = random.Random(5).randrange(20)
    [sample] = play(agent, ["hm", str(number - 1), str(number)], task(5))
    assert (sample.metadata["env"]["rewards"], sample.metadata["env"]["errors"]) == ([0.0, 0.0, 1.0], 1)


def test_players_have_a_chat_a_sample_and_a_reward_each(play: Play):
    samples = play(play.agent("Duel", {}), ["b", "k"])
    rewards = {sample.metadata["env"]["player"]: (sample.response, sample.reward) for sample in samples}
    assert rewards == {0: ("b", -1.0), 1: ("k", 1.0)}
    assert {len(sample.metadata["agent"]["turns"]) for sample in samples} == {1}


def test_tools_of_an_environment_are_called_in_the_notation_of_the_template(play: Play):
    sample = Sample(prompt="2 and 3?", label="5")
    [answered] = play(play.agent("Adder", {}), [call_text(a=2, b=3), "five"], sample)
    assert 'called with {"a": 2, "b": 3}' in answered.response
    assert (answered.reward, answered.metadata["env"]["tool_calls"], answered.label) == (None, 1, "5")
    assert '"name": "add"' in play.tokenizer.decode(answered.tokens[: answered.prompt_length])


def test_a_verifier_that_is_named_decides_alone(play: Play):
    [sample] = play(play.agent("Guess", {"high": 10}, gives_reward=False), [str(number_of(0))])
    assert (sample.reward, sample.metadata["env"]["rewards"]) == (None, [1.0])


def test_a_prompt_that_is_no_task_says_what_to_give(play: Play, guess: EnvironmentAgent):
    with pytest.raises(
        RecordError, match=r"prompt 4: not a task of python:.*Guess\. Give env, or env@\[a:b\], as data"
    ):
        play(guess, ["1"], Sample(prompt="hello", group_index=4))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("gymnasum:X", {}, "no environment 'gymnasum'. Did you mean gymnasium"),
        (f"python:{GAMES}:Troubled", {"first": "refuse"}, "ValueError: no such level"),
        (f"python:{GAMES}:Path", {}, "TypeError"),
        ("python:builtins:isinstance", {}, "TypeError"),
        (f"python:{GAMES}:Nothing", {}, "games.py has no such name: Nothing"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_one_line(name: str, arguments: dict[str, Any], message: str):
    with pytest.raises(SlimectlError, match=message) as caught:
        EnvironmentHost(specification_of(name, arguments)).description()
    assert "\n" not in str(caught.value)


def test_a_package_that_is_missing_is_named_with_the_remedy():
    empty = specification_of("textarena:X", {}, sys.executable)
    try:
        import textarena  # noqa: F401
    except ImportError:
        with pytest.raises(SlimectlError, match=r"needs textarena, which .* pip install 'slimectl\[textarena\]', or"):
            EnvironmentHost(empty).description()
    with pytest.raises(SlimectlError, match=r"rollout.env_python: cannot start /no/python: No such file"):
        EnvironmentHost(specification_of("textarena:X", {}, "/no/python")).description()


def test_tasks_are_a_source_of_prompts_that_can_be_sliced_and_begun_anywhere():
    settings = load_settings(None, {"rollout.env": f"python:{GAMES}:Guess", "rollout.shuffle": True})
    assert settings.rollout.data == ["env"]

    def tasks(*sources: str, start: int = 0) -> list[Any]:
        return [prompt.metadata["env"]["task"] for prompt in prompts(settings, list(sources), start=start)]

    assert sorted(tasks("env")) == list(range(1000))
    assert tasks("env", start=990) == tasks("env")[990:]
    assert sorted(tasks("env@[5000:5003]", "env:eval@[0:2]")) == [0, 1, 5000, 5001, 5002]
    assert {prompt.metadata["env"]["split"] for prompt in prompts(settings, ["env:eval"])} == {"eval"}


def test_tasks_that_are_not_there_are_refused_in_one_line():
    with pytest.raises(
        SettingsError, match=r"env@\[:5\].*|env: this source is the tasks of rollout.env, which is not set"
    ):
        next(prompts(load_settings(None), ["env@[:5]"]))
    adder = load_settings(None, {"rollout.env": f"python:{GAMES}:Adder"})
    with pytest.raises(SettingsError, match=r"has no tasks of its own\. Give a file of prompts"):
        next(prompts(adder, ["env"]))
    for values, message in (
        ({"rollout.env": "a:b", "rollout.agent": "true"}, "rollout.env and rollout.agent cannot be combined"),
        ({"rollout.env_max_turns": 3}, "rollout.env_max_turns has no effect without an environment"),
        ({"rollout.env": "frozen lake"}, "rollout.env: frozen lake: write it as KIND:ID"),
    ):
        with pytest.raises(SettingsError, match=message):
            load_settings(None, values)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.4.0", r"start a program for every task\. "),
        ("1.0.0rc1", r"start a program for every task\. "),
        ("0.2.7", ""),
    ],
)
def test_a_version_of_verifiers_with_other_environments_is_named(version: str, reason: str):
    line = rf"verifiers {version} in .*: slimectl runs environments of verifiers 0\.3\. .*{reason}Run: pip install"
    with pytest.raises(BackendError, match=line):
        _check_version(version)
    _check_version("0.3.1")
