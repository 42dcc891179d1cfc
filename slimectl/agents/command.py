"""An agent that is a program. It is started once per attempt, and calls the policy over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shlex
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slimectl.agents.answer import AnswerReader
from slimectl.agents.endpoint import SessionServer
from slimectl.agents.process import AgentProcess, Ending
from slimectl.agents.session import Session, SessionLimits, reward_value
from slimectl.data.chat import chat_of
from slimectl.errors import HookError
from slimectl.system.loopback import without_proxy
from slimectl.system.redaction import redact_text
from slimectl.types import Sample, SamplingParams, Status

TICK_S = 0.05
"""Seconds between checks of a running attempt."""
TEMPORARY_FAILURE = 75
"""Exit status with which a program asks to be tried again (EX_TEMPFAIL of sysexits.h)."""
INTERPRETERS = ("python", "pypy", "bash", "sh", "zsh", "node", "ruby", "perl")
"""Programs whose first argument is a script file."""
TAIL = 4000
"""Characters of each output that a sample keeps."""


@dataclasses.dataclass(frozen=True, slots=True)
class CommandOptions:
    """Options of an agent's command. `timeout_s` does not count the time in which the policy answers."""

    command: str
    timeout_s: float = 600.0
    max_turns: int = 64
    retries: int = 1
    concurrency: int = 16
    model: str = "*"
    gives_reward: bool = True
    """Whether the program's reward counts, because no verifier is set."""
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of the chat template. A request may add more."""


class CommandAgent:
    """Runs the command for an attempt, and returns a sample for each branch of its requests."""

    name = "rollout.agent"
    resumes = False
    per_group = False
    limits_time = True
    """This agent limits the time of its attempts, so the limit on tool time does not apply."""
    renders_chats = True
    """Every request goes through the chat template, including string prompts."""

    def __init__(self, options: CommandOptions) -> None:
        self.options = options
        self.argv = shlex.split(options.command)
        if not self.argv or shutil.which(self.argv[0]) is None:
            program = self.argv[0] if self.argv else ""
            raise HookError(f"rollout.agent: program {program!r} not found. Give one, e.g. 'python agent.py'.")
        if (script := script_of(self.argv)) is not None and not Path(script).is_file():
            raise HookError(f"rollout.agent: {script}: no such file. Give the path from this folder, {Path.cwd()}.")
        self._hosts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Host] = weakref.WeakKeyDictionary()

    async def __call__(self, arguments: Mapping[str, Any]) -> list[Sample]:
        """Return the samples of one attempt. Raises RuntimeError if the program ended before it got an answer."""
        host = await self._host(arguments["tokenizer"])
        async with host.places:
            for remaining in reversed(range(self.options.retries + 1)):
                session = self._session(host, arguments)
                ending = await self._attempt(host, session, arguments["sample"])
                if session.is_aborted or not (remaining and _was_accident(ending, session)):
                    return self._samples(session, ending, arguments["sample"])
        raise AssertionError("unreachable")

    async def _host(self, tokenizer: Any) -> _Host:
        """Return the endpoint of this event loop, which starts with the first attempt."""
        loop = asyncio.get_running_loop()
        host = self._hosts.get(loop)
        if host is None:
            host = self._hosts[loop] = _Host(self.options.concurrency, AnswerReader(tokenizer))
        async with host.starting:
            if not host.server.address:
                await host.server.start()
        return host

    def _session(self, host: _Host, arguments: Mapping[str, Any]) -> Session:
        params: SamplingParams = arguments["sampling_params"]
        limits = SessionLimits(self.options.max_turns, params.max_tokens, arguments.get("context"))
        policy = (arguments["tokenizer"], host.reader, arguments["generate"])
        return Session(*policy, params, limits, self.options.model, self.options.template_kwargs)

    async def _attempt(self, host: _Host, session: Session, sample: Sample) -> Ending:
        """Run the command once, until it ends, its time is up, or the round is over."""
        folder = Path(tempfile.mkdtemp(prefix="slimectl-agent-"))
        try:
            async with host.server.open(session) as address:
                task = json.dumps(task_of(sample), ensure_ascii=False)
                (folder / "task.json").write_text(task, encoding="utf-8", errors="replace")
                environment = agent_environment(address, folder, self.options.model)
                process = await AgentProcess.start(self.argv, task, environment)
                try:
                    return await self._supervise(process, session)
                finally:
                    await process.kill()
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _supervise(self, process: AgentProcess, session: Session) -> Ending:
        spent_s, began = 0.0, time.monotonic()
        has_ended = False
        while not (has_ended or session.is_aborted) and spent_s < self.options.timeout_s:
            has_ended = await process.ended_within(TICK_S)
            spent_s += 0.0 if session.is_answering else TICK_S
        seconds = time.monotonic() - began
        await process.kill()
        return dataclasses.replace(process.ending(seconds), timed_out=not (has_ended or session.is_aborted))

    def _samples(self, session: Session, ending: Ending, sample: Sample) -> list[Sample]:
        if session.is_aborted:
            sample.status = Status.ABORTED
            return [sample]
        report: dict[str, Any] = {
            "exit_code": ending.exit_code,
            "seconds": round(ending.seconds, 3),
            "timed_out": ending.timed_out,
        }
        outputs = {"stdout": _tail(ending.stdout), "stderr": _tail(ending.stderr)}
        report |= {name: text for name, text in outputs.items() if text}
        sample.non_generation_time = max(0.0, ending.seconds - session.answering_s)
        samples = session.samples(sample)
        if not samples:
            sample.metadata["agent"] = session.report() | report
            last_line = f": {outputs['stderr'].splitlines()[-1]}" if outputs["stderr"].strip() else ""
            raise RuntimeError(f"the agent ended with status {ending.exit_code} before it got a response{last_line}")
        reward = _reward(session, ending) if self.options.gives_reward else None
        for branch in samples:
            branch.metadata["agent"] |= report
            branch.reward = reward
            if session.is_cut or ending.timed_out:
                branch.status = Status.TRUNCATED
        return samples


def script_of(argv: Sequence[str]) -> str | None:
    """Return the script of a command line that starts with an interpreter, or None if there is no script.

    The script is the first argument after `-u`. A module (`python -m agent`) is not one, and neither is code
    (`bash -c "..."`).

    >>> script_of(["/usr/bin/python3.12", "-u", "agent.py", "task.py"]), script_of(["python", "-m", "agent"])
    ('agent.py', None)
    """
    program, arguments = Path(argv[0]).name.rstrip("0123456789."), [word for word in argv[1:] if word != "-u"]
    is_script = program in INTERPRETERS and bool(arguments) and not arguments[0].startswith("-")
    return arguments[0] if is_script else None


class _Host:
    """The endpoint and the slots that the attempts of one event loop share."""

    def __init__(self, concurrency: int, reader: AnswerReader) -> None:
        self.server = SessionServer()
        self.places = asyncio.Semaphore(concurrency)
        self.starting = asyncio.Lock()
        self.reader = reader


def task_of(sample: Sample) -> dict[str, Any]:
    """Return the task for the program: the row with its label, because the program may grade itself."""
    return {
        "prompt": sample.prompt,
        "messages": chat_of(sample),
        "index": sample.index,
        "group_index": sample.group_index,
        "label": sample.label,
        "metadata": sample.metadata,
        **sample.extra,
    }


def agent_environment(address: str, folder: Path, model: str) -> dict[str, str]:
    """Return the command's environment: this process's without our settings, and with the address of the policy."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLIMECTL_")}
    key = address.rpartition("/")[2]
    name = "policy" if model == "*" else model
    return inherited | {
        "OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_BASE": f"{address}/v1", "OPENAI_API_KEY": key,
        "OPENAI_MODEL": name, "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "ANTHROPIC_BASE_URL": address, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": name,
        "SLIMECTL_SESSION_URL": address, "SLIMECTL_MODEL": name, "SLIMECTL_TASK": str(folder / "task.json"),
        **without_proxy(inherited),
    }  # fmt: skip


def _was_accident(ending: Ending, session: Session) -> bool:
    """Return whether the attempt failed for reasons other than the model: killed, exit 75, or before any answer."""
    if ending.timed_out or ending.exit_code == 0:
        return False
    return ending.exit_code < 0 or ending.exit_code == TEMPORARY_FAILURE or not session.tree.turns


def _reward(session: Session, ending: Ending) -> Any:
    """Return the posted reward, else the one on stdout's last line, else 1 for exit status 0 and 0 for others."""
    if session.reward is not None:
        return session.reward
    lines = [line for line in ending.stdout.splitlines() if line.strip()]
    reward = reward_line(lines[-1]) if lines else None
    if reward is not None and not ending.timed_out:
        return reward
    return float(ending.exit_code == 0 and not ending.timed_out)


def reward_line(line: str) -> Any:
    """Return the reward in a line of JSON: a number, or an object with a `reward`. None for any other line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return reward_value(value.get("reward") if isinstance(value, dict) else value)


def _tail(text: str) -> str:
    return redact_text(text[-TAIL:].replace("\0", "�"))
