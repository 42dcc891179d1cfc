"""An agent as a program: started for each sample, ended with all that it started, its reward read."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from agents.sessions import ScriptedEngine, merging_tokenizer

from slimectl.agents.command import TICK_S, CommandAgent, CommandOptions, reward_line
from slimectl.agents.process import AgentProcess, Ending
from slimectl.errors import HookError
from slimectl.system.redaction import MASK
from slimectl.types import Completion, Sample, SamplingParams, Status

CLIENT = """
import json, os, sys, time, urllib.request
task = json.loads(sys.stdin.readline())

def ask(text, **more):
    body = json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


class Run:
    """Runs a program of given lines as the agent of one sample."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.agent: CommandAgent

    def __call__(
        self, program: str, sample: Sample | None = None, generate: Any = None, **options: Any
    ) -> list[Sample]:
        self.path.write_text(CLIENT + textwrap.dedent(program))
        tokenizer = merging_tokenizer()
        engine = ScriptedEngine([[*tokenizer.encode("seven"), tokenizer.eos_token_id]], tokenizer)
        self.agent = CommandAgent(CommandOptions(command=shlex.join([sys.executable, str(self.path)]), **options))
        arguments = {
            "sample": sample or Sample(prompt="what?", label="7"), "tokenizer": tokenizer, "context": 200,
            "generate": generate or engine.generate, "sampling_params": SamplingParams(max_tokens=100),
        }  # fmt: skip
        return asyncio.run(self.agent(arguments))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "agent.py")


def runs(pid: int) -> bool:
    """Whether a process is there that nobody has ended."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("ask('x')", 1.0),
        ("ask('x'); sys.exit(3)", 0.0),
        ("print('so:'); print(len(ask('x')) / 10)", 0.5),
        ("ask('x'); print(json.dumps({'reward': {'score': 2, 'style': 1}}))", {"score": 2, "style": 1}),
        ("ask('x'); print('nan')", 1.0),
    ],
)
def test_the_reward_is_the_last_line_or_the_exit_status(run: Run, program: str, reward: Any):
    [sample] = run(program)
    assert (sample.reward, sample.response, sample.status) == (reward, "seven", Status.COMPLETED)


def test_the_name_of_the_policy_is_in_the_environment_and_another_is_an_error(run: Run):
    [sample] = run("ask('x', model=os.environ['OPENAI_MODEL'])", model="mine")
    assert sample.reward == 1.0
    with pytest.raises(RuntimeError, match="ended with status 1 before it got a response"):
        run("ask('x', model='gpt-4o')", model="mine")


def test_a_verifier_that_is_named_decides_alone(run: Run):
    [sample] = run("print(ask('x'))", gives_reward=False)
    assert sample.reward is None


def test_the_task_comes_on_stdin_and_in_a_file_and_the_outputs_are_kept(run: Run):
    program = """
    assert json.load(open(os.environ["SLIMECTL_TASK"])) == task
    print(task["messages"], task["level"], task["metadata"])
    print("a word\\0", os.environ["OPENAI_API_KEY"] in os.environ["OPENAI_BASE_URL"], file=sys.stderr)
    ask(task["prompt"])
    """
    sample = Sample(index=3, prompt="what?", label="7", metadata={"k": 1}, extra={"level": 2})
    [sample] = run(program, sample)
    report = sample.metadata["agent"]
    assert report["stdout"] == "[{'role': 'user', 'content': 'what?'}] 2 {'k': 1}\n"
    assert report["stderr"] == "a word� True\n"
    assert (report["exit_code"], sample.index, sample.label) == (0, 3, "7")


def test_an_agent_that_never_asks_is_a_failure_that_says_so(run: Run):
    sample = Sample(prompt="what?")
    with pytest.raises(RuntimeError, match="ended with status 1 before it got a response: ValueError: no key"):
        run("print('here'); time.sleep(0.1); raise ValueError('no key')", sample)
    report = sample.metadata["agent"]
    assert (report["exit_code"], report["turn_count"], report["stdout"]) == (1, 0, "here\n")
    assert report["stderr"].endswith("ValueError: no key\n")
    assert report["seconds"] == pytest.approx(sample.non_generation_time, abs=1e-3)
    assert report["seconds"] > 0.1


def test_the_time_of_the_policys_answers_is_not_the_programs(run: Run):
    async def generate(tokens: list[int], params: SamplingParams) -> Completion:
        await asyncio.sleep(0.3)
        return Completion([5], [-1.0], "x", "stop")

    [sample] = run("ask('x'); time.sleep(0.1)", generate=generate)
    assert 0.1 < sample.non_generation_time <= sample.metadata["agent"]["seconds"] - 0.29


def test_a_program_that_dies_by_accident_is_tried_again_and_a_wrong_answer_is_not(run: Run, tmp_path: Path):
    program = f"""
    path = {str(tmp_path / "count")!r}
    open(path, "a").write("x")
    ask("x")
    first = open(path).read() == "x"
    if first:
        END
    """
    [sample] = run(program.replace("END", "sys.exit(75)"), retries=0)
    assert sample.reward == 0.0
    for end, tries in (("os.kill(os.getpid(), 9)", 2), ("sys.exit(75)", 2), ("sys.exit(1)", 1)):
        (tmp_path / "count").unlink(missing_ok=True)
        [sample] = run(program.replace("END", end))
        assert ((tmp_path / "count").read_text(), len(sample.metadata["agent"]["turns"])) == ("x" * tries, 1)
        assert sample.reward == float(tries == 2)


def test_a_program_is_ended_at_its_limit_with_children_that_left_its_group(run: Run, tmp_path: Path):
    program = f"""
    import subprocess
    ask("x")
    words = [sys.executable, "-c", "import time; time.sleep(1000)"]
    child = subprocess.Popen(words, start_new_session=True, env={{}})
    open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    ask("y")
    time.sleep(1000)
    """
    answers = []

    async def generate(tokens: list[int], params: SamplingParams) -> Completion:
        answers.append(tokens)
        if len(answers) == 2:  # all that the program does is done, so its time may end
            run.agent.options = replace(run.agent.options, timeout_s=0.1)
        return Completion([5], [-1.0], "x", "stop")

    samples = run(program, generate=generate)
    assert {(sample.status, sample.reward) for sample in samples} == {(Status.TRUNCATED, 0.0)}
    assert samples[0].metadata["agent"]["timed_out"] is True
    assert not runs(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("leave", ["pass", "os.setsid(); os.fork() and os._exit(0)"], ids=["child", "daemon"])
def test_children_that_outlive_the_program_are_ended(run: Run, tmp_path: Path, leave: str):
    """A daemon has another session and parent than its program, and an environment without a name of ours."""
    path = tmp_path / "pid"
    program = f"""
    ask("x")
    if not os.fork():
        {leave}
        code = "import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
        os.execve(sys.executable, ["python", "-c", code], {{}})
    while not os.path.exists({str(path)!r}) or not open({str(path)!r}).read():
        time.sleep(0.01)
    """
    [sample] = run(program)
    assert sample.metadata["agent"]["exit_code"] == 0
    assert not runs(int(path.read_text()))


async def ending_of(*words: str) -> Ending:
    process = await AgentProcess.start(words, "", os.environ)
    assert await process.ended_within(60)
    await process.kill()
    return process.ending(0.0)


@pytest.mark.parametrize(("program", "code"), [("exit 7", 7), ("kill -9 $$", -9), ("kill -15 $$", -15)])
def test_the_exit_status_is_the_programs_and_a_signal_is_below_zero(program: str, code: int):
    assert asyncio.run(ending_of("sh", "-c", program)).exit_code == code


def test_a_program_that_cannot_be_executed_says_why(tmp_path: Path):
    (tmp_path / "agent").write_bytes(b"no program")
    (tmp_path / "agent").chmod(0o755)
    ending = asyncio.run(ending_of(str(tmp_path / "agent")))
    assert (ending.exit_code, ending.stderr) == (127, f"{tmp_path}/agent: Exec format error\n")


def test_a_program_ends_with_a_command_that_is_killed(tmp_path: Path):
    command = """
    import asyncio, os
    from slimectl.agents.process import AgentProcess

    async def leave():
        await AgentProcess.start(["sh", "-c", "echo $$ > pid; sleep 1000"], "", os.environ)
        while not os.path.exists("pid") or not open("pid").read():
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), 9)

    asyncio.run(leave())
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(command)], cwd=tmp_path, timeout=60)
    assert ended.returncode == -9
    deadline = time.monotonic() + 30
    while runs(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_output_that_another_process_holds_leaves_no_traceback(tmp_path: Path):
    command = """
    import asyncio, os, sys
    from slimectl.agents.process import AgentProcess

    async def hold():
        words = ["sh", "-c", "echo $$ > pid; while test ! -e held; do sleep 0.01; done"]
        process = await AgentProcess.start(words, "", os.environ)
        while not os.path.exists("pid") or not open("pid").read():
            await asyncio.sleep(0.01)
        output = os.open(f"/proc/{int(open('pid').read())}/fd/1", os.O_WRONLY)
        open("held", "w").close()
        await process.ended_within(60)
        await process.kill()
        return output

    asyncio.run(hold())
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(command)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")


class CountedProcess:
    """A program that ends after so many looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    async def ended_within(self, seconds: float) -> bool:
        self.looks -= 1
        return self.looks < 0

    async def kill(self) -> None: ...

    def ending(self, seconds: float) -> Ending:
        return Ending(0, seconds, "", "")


@pytest.mark.parametrize(("answering", "timed_out"), [(True, False), (False, True)])
def test_time_in_which_the_policy_answers_does_not_count(answering: bool, timed_out: bool):
    agent = CommandAgent(CommandOptions(command=shlex.quote(sys.executable), timeout_s=50 * TICK_S))
    session: Any = SimpleNamespace(is_aborted=False, is_answering=answering)
    process: Any = CountedProcess(60)
    assert asyncio.run(agent._supervise(process, session)).timed_out == timed_out


def test_turns_and_tokens_are_limited_and_the_program_sees_an_error(run: Run):
    program = """
    import urllib.error
    for _ in range(9):
        try:
            ask("x")
        except urllib.error.HTTPError as error:
            print(json.load(error)["error"]["code"])
            sys.exit(0)
    """
    samples = run(program, max_turns=3)
    assert len(samples) == 3
    assert {sample.status for sample in samples} == {Status.TRUNCATED}
    assert samples[0].metadata["agent"]["stdout"] == "turn_limit\n"
    assert samples[0].metadata["agent"]["refused_requests"] == 1
    [sample] = run("ask('x')\nask('y' * 5000)")
    assert sample.metadata["agent"]["exit_code"] == 1


def test_an_attempt_that_the_round_breaks_off_is_ended_and_begun_anew_later(run: Run):
    async def interrupted(tokens: list[int], params: SamplingParams) -> Completion:
        return Completion([], [], "", "abort")

    [sample] = run("ask('x')", generate=interrupted)
    assert (sample.status, sample.tokens, sample.reward) == (Status.ABORTED, [], None)


def test_secrets_that_a_program_prints_are_masked_and_floods_are_cut(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIMECTL_ENGINE__API_KEY", "hunter2-correct-horse")
    program = """
    ask("x")
    print("x" * 10_000_000, os.environ.get("SLIMECTL_ENGINE__API_KEY"), "Bearer hunter2-correct-horse")
    """
    [sample] = run(program)
    words = sample.metadata["agent"]["stdout"]
    assert len(words) <= 4100
    assert words.endswith(f"None Bearer {MASK}\n")


def test_a_program_that_is_not_there_is_refused_before_anything_starts():
    with pytest.raises(HookError, match="program 'no-such-agent' not found"):
        CommandAgent(CommandOptions(command="no-such-agent --fast"))


@pytest.mark.parametrize(
    ("command", "is_refused"),
    [
        ("python gone.py", True), ("bash gone.sh --fast", True), ("python -u gone.py", True),
        ("python -m gone", False), ("bash -c gone.sh", False), ("env python gone.py", False), ("true gone.py", False),
    ],
)  # fmt: skip
def test_a_script_that_is_not_there_is_refused_where_an_interpreter_would_read_it(command: str, is_refused: bool):
    with pytest.raises(HookError, match=r"gone\.\w+: no such file") if is_refused else nullcontext():
        CommandAgent(CommandOptions(command=command))


def test_many_attempts_run_beside_one_another_within_their_number(tmp_path: Path):
    path = tmp_path / "agent.py"
    path.write_text(CLIENT + "ask('x'); print(task['index'])\n")
    tokenizer = merging_tokenizer()
    running, most, three = 0, 0, asyncio.Event()

    async def generate(tokens: list[int], params: SamplingParams) -> Completion:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            three.set()
        await three.wait()
        await asyncio.sleep(0.2)
        running -= 1
        return Completion([5], [-1.0], "x", "stop")

    agent = CommandAgent(CommandOptions(command=shlex.join([sys.executable, str(path)]), concurrency=3))
    arguments = {"tokenizer": tokenizer, "generate": generate, "sampling_params": SamplingParams(), "context": None}

    async def attempts() -> list[list[Sample]]:
        return await asyncio.gather(*(agent({**arguments, "sample": Sample(index=i)}) for i in range(6)))

    results = asyncio.run(attempts())
    assert [sample.reward for [sample] in results] == [0, 1, 2, 3, 4, 5]
    assert most == 3


@pytest.mark.parametrize(
    ("line", "reward"), [("3", 3), ("true", 1.0), ("[1]", None), ('{"score": 1}', None), ("x", None)]
)
def test_a_line_is_a_reward_if_it_says_so(line: str, reward: Any):
    assert reward_line(line) == reward
