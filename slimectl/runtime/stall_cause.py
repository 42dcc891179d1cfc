"""Names the part of a run that is stuck, from the stacks of its processes."""

from __future__ import annotations

import linecache
import os
import re
import site
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from slimectl.settings import Settings
from slimectl.settings.keys import flat
from slimectl.system.processes import PIPE_FULL, STATES, ProcessView
from slimectl.system.redaction import redact_text
from slimectl.system.stdio import quantity

HEAD = re.compile(r'^(?:Current )?(?P<kind>[Tt]hread|Task) (?P<name>"[^"]*"|\S+)')
OPERATION = re.compile(r"^Operation \d+ of .*$", re.M)
FRAME = re.compile(r'^  File "(?P<file>.*?)", line (?P<line>\d+) in (?P<function>[^#]+?)(?:  # (?P<detail>.*))?$')
PACKAGE = str(Path(__file__).parents[1]) + os.sep
LIBRARIES = tuple(
    {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages(), sys.base_prefix, "<"}
)
IDLE = (
    ("executors/worker_pool.py", "_work"), ("executors/rank_process.py", "recv_bytes"),
    ("executors/rank_group.py", "_leave_with_parent"), ("agents/environments/host.py", "_serve"),
    ("agents/environments/host.py", "_run_episode"),
    ("system/liveness.py", "_answer_requests"),
)  # fmt: skip
"""Functions in which a thread waits for work."""
LONGEST = 60
"""Characters of a source line that a message shows."""
SHOWN = 2
"""Number of programs that a message lists."""
BLOCKED_CONTEXTS = (
    ("/slimectl/trackers/", "a tracker"),
    ("/runtime/evaluator.py", "the evaluation"),
    ("/data/run_dir.py", "the checkpoint"),
    ("/runtime/recorder.py", "the record of a step"),
    ("/engines/weight_sync/", "the push of weights to the engines"),
    ("/stages/score.py", "the grading of samples"),
    ("/stages/train.py", "the training step"),
    ("/runtime/run_parts.py", "the start of the run"),
    ("/stages/rounds.py", "the sampling of a round"),
)
"""What the thread of a run does, by a file on its stack."""


@dataclass(frozen=True)
class Frame:
    """A line of a stack. `detail` is what it works on, if known."""

    file: str
    line: int
    function: str
    detail: str = ""

    @property
    def is_users(self) -> bool:
        return not self.file.startswith((PACKAGE, *LIBRARIES)) and "/site-packages/" not in self.file

    @property
    def is_ours(self) -> bool:
        return self.file.startswith(PACKAGE)

    def __str__(self) -> str:
        """Return place and source line: reward.py:9 (reward): `lock.acquire()`."""
        name = self.file.removeprefix(PACKAGE) if self.is_ours else os.path.relpath(self.file)
        source = linecache.getline(self.file, self.line).strip()
        source = source if len(source) <= LONGEST else f"{source[:LONGEST]}…"
        return f"{name}:{self.line} ({self.function})" + (f": `{source}`" if source else "")


@dataclass(frozen=True)
class Stack:
    """A thread, or a task of an event loop, with its frames from the innermost one."""

    name: str
    frames: tuple[Frame, ...]

    @property
    def is_idle(self) -> bool:
        inner = next((frame for frame in self.frames if frame.is_ours or frame.is_users), None)
        return inner is None or any(inner.file.endswith(file) and inner.function == name for file, name in IDLE)

    @property
    def users(self) -> Frame | None:
        """The innermost frame of user code that slimectl has called."""
        ours = [number for number, frame in enumerate(self.frames) if frame.is_ours]
        return next((frame for frame in self.frames[: ours[-1] if ours else 0] if frame.is_users), None)

    @property
    def place(self) -> Frame | None:
        """The innermost frame of the user's or our code."""
        return self.users or next((frame for frame in self.frames if frame.is_ours), None)

    def within(self, part: str) -> Frame | None:
        """Return the innermost frame in a file whose path has this part."""
        return next((frame for frame in self.frames if part in frame.file), None)

    @property
    def collective(self) -> str:
        """The collective operation of torch.distributed in which the thread waits, with its subject, or ""."""
        inner = [frame for frame in self.frames if "/torch/distributed/" in frame.file]
        if not inner:
            return ""
        subject = next((frame.detail for frame in self.frames if frame.detail and "/plugins/" not in frame.file), "")
        calls = [frame.function for frame in inner if "distributed_c10d" in frame.file and frame.function != "wrapper"]
        name = calls[-1] if calls else inner[-1].function
        return f"{name} of {subject}" if subject else name


def parse_stacks(text: str) -> list[Stack]:
    """Read the stacks of a process, as faulthandler and liveness.own_stacks write them."""
    stacks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if head := HEAD.match(line):
            stacks.append((f"{head['kind'].lower()} {head['name']}", []))
        elif stacks and (frame := FRAME.match(line)):
            place = Frame(frame["file"], int(frame["line"]), frame["function"].strip(), frame["detail"] or "")
            stacks[-1][1].append(place)
    return [Stack(name, tuple(frames)) for name, frames in stacks]


@dataclass(frozen=True)
class Part:
    """A process of a run, with its stacks."""

    view: ProcessView

    @cached_property
    def stacks(self) -> list[Stack]:
        return parse_stacks(self.view.stacks)

    @property
    def name(self) -> str:
        place = f" on {self.view.machine}" if self.view.machine else ""
        return f"{self.view.name or self.view.command[:60]} (process {self.view.pid}{place})"

    @cached_property
    def busy(self) -> list[Stack]:
        return [stack for stack in self.stacks if not stack.is_idle]

    @property
    def is_idle(self) -> bool:
        """Whether it waits for work. A process without stacks does not answer."""
        return bool(self.stacks) and not self.busy

    @cached_property
    def operation(self) -> str:
        """The oldest collective operation that has not ended, as torch's flight recorder has it, or ""."""
        match = OPERATION.search(self.view.stacks)
        return match[0] if match else ""

    @property
    def collective(self) -> str:
        """The collective operation in which a rank waits, or ""."""
        return next(filter(None, (stack.collective for stack in self.busy)), "") or self.operation

    @cached_property
    def main(self) -> Stack | None:
        """The stack that shows best what the process does: one with the user's code, else the last busy one."""
        return next((stack for stack in self.busy if stack.users), self.busy[-1] if self.busy else None)


class StallCause:
    """Names what a run waits for. `driver` is the run's own process, and `children` are the processes that it started.

    `hooks` are settings that may name a function, with their values.
    """

    def __init__(self, driver: ProcessView, children: Sequence[ProcessView], hooks: Sequence[tuple[str, str]]) -> None:
        self.driver, self.children = Part(driver), [Part(view) for view in children]
        self._hooks = hooks

    def __str__(self) -> str:
        looks = (
            self._stopped, self._ranks, self._user_code_elsewhere, self._servers, self._programs, self._hosts,
            self._threads,
        )  # fmt: skip
        return next(filter(None, (look() for look in looks)), "the cause is not known")

    def _stopped(self) -> str:
        """A process that a signal stopped, or that hangs in the kernel."""
        for part in self.children:
            if part.view.state in ("T", "t"):
                return f"{part.name} is {STATES[part.view.state]}"
        for part in self.children:
            if part.view.state == "D" and part.view.name:
                return f"{part.name} is {STATES['D']}" + (f" and {part.view.waits}" if part.view.waits else "")
        return ""

    def _ranks(self) -> str:
        """Training ranks that have not answered: the one that the others wait for, or collectives that differ."""
        ranks = [part for part in self.children if part.view.name.startswith("rank ") and not part.is_idle]
        ranks.sort(key=lambda part: part.view.name)
        if not ranks:
            return ""
        calls = {part.view.name: part.collective for part in ranks}
        waiting = [f"{name} waits in {call}" for name, call in calls.items() if call]
        if len(waiting) < len(ranks):
            culprits = "; ".join(self._describe(part) for part in ranks if not part.collective)
            return f"{culprits}. Meanwhile {', '.join(waiting)}" if waiting else culprits
        if len(set(calls.values())) > 1 or len({part.operation for part in ranks}) > 1:
            details = (
                (part.operation[:1].lower() + part.operation[1:], part.main and part.main.place) for part in ranks
            )
            places = ["; ".join(str(detail) for detail in pair if detail) for pair in details]
            calls = {name: f"{call} ({place})" for (name, call), place in zip(calls.items(), places, strict=True)}
            differing = ", ".join(f"{name} is in {call}" for name, call in calls.items())
            return f"the ranks do not call the same collective operations: {differing}"
        numbers = ", ".join(name.removeprefix("rank ") for name in calls)
        return f"ranks {numbers} all wait in {ranks[0].collective}. Check the network between them"

    def _user_code_elsewhere(self) -> str:
        """User code in a worker, an environment or an actor."""
        return next((self._describe(part) for part in self._busy() if any(s.users for s in part.busy)), "")

    def _hosts(self) -> str:
        return next(map(self._describe, self._busy()), "")

    def _busy(self) -> Iterator[Part]:
        return (part for part in self.children if part.view.name not in ("", "server") and part.busy)

    def _describe(self, part: Part) -> str:
        """Return what a process does: the hook, the place in the code, and what it waits for."""
        if part.main is None or part.main.place is None:
            return f"{part.name} does not answer" + (f" and {part.view.waits}" if part.view.waits else "")
        return f"{part.name} is stuck in {self._place(part.main)}{self._waits_of(part.view)}"

    def _place(self, stack: Stack) -> str:
        frame = stack.place
        assert frame is not None
        setting = self._setting_of(stack)
        return f"{frame} ({setting})" if setting else str(frame)

    def _setting_of(self, stack: Stack) -> str:
        """Return `SETTING = VALUE` for the setting that names a function on the stack, or ""."""
        called = {(Path(frame.file).stem, frame.function) for frame in stack.frames if not frame.is_ours}
        files = {stem for stem, _ in called}
        named = [(key, value, *_named_function(value)) for key, value in self._hooks]
        exact = [(key, value) for key, value, stem, function in named if (stem, function) in called]
        of_file = [(key, value) for key, value, stem, function in named if stem in files and not function]
        return next((f"{key} = {value}" for key, value in (*exact, *of_file)), "")

    def _waits_of(self, view: ProcessView) -> str:
        """Return the wait of a process, or of the program that it waits for."""
        children = [part.view for part in self.children if part.view.parent == view.pid and not part.view.name]
        stuck = next((child for child in children if PIPE_FULL in child.waits), None)
        if stuck is not None:
            return f". Its child process {stuck.pid} ({stuck.command[:60]}) {stuck.waits}"
        return f". It {view.waits}" if view.waits else ""

    def _servers(self) -> str:
        """Servers with requests in flight."""
        stacks = [stack for part in (self.driver, *self.children) for stack in part.stacks]
        for file in ("/slimectl/engines/http/dispatch.py", "/slimectl/system/client.py", "/slimectl/system/http.py"):
            frames = filter(None, (stack.within(file) for stack in stacks))
            requests = Counter(frame.detail for frame in frames if frame.detail.startswith("http"))
            if requests:
                counts = ((url, quantity(count, "request")) for url, count in requests.items())
                return ", ".join(f"the server at {url} has not answered {count}" for url, count in counts)
        return ""

    def _programs(self) -> str:
        """An agent's program, or an environment, that an attempt waits for."""
        for part in (self.driver, *self.children):
            for stack in part.stacks:
                if stack.within("/slimectl/agents/command.py") and not stack.is_idle:
                    programs = [p for p in self.children if "process_supervisor" in p.view.command]
                    supervisors = {p.view.pid for p in programs}
                    running = (p.view for p in self.children if p.view.parent in supervisors)
                    names = [f"{view.command[:60]} (process {view.pid}) {view.waits}".strip() for view in running]
                    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                    return f"the agent's program does not end: {', '.join(names[:SHOWN]) or 'not started'}{more}"
                if stack.within("/slimectl/agents/environments/") and not stack.is_idle:
                    return f"the environment does not answer: {stack.place}"
        return ""

    def _threads(self) -> str:
        """A thread of the run: in the user's code, else the main thread."""
        stacks = [stack for stack in self.driver.stacks if not stack.is_idle]
        stack = next((stack for stack in stacks if stack.users), None)
        main = next((stack for stack in stacks if "MainThread" in stack.name), stacks[-1] if stacks else None)
        stack = stack or main
        if stack is None or stack.place is None:
            return ""
        place = self._place(stack)
        waits = self._waits_of(self.driver.view) if stack is main else ""
        context = next((text for file, text in BLOCKED_CONTEXTS if main is not None and main.within(file)), "the run")
        return f"{context} is stuck in {place}{waits}"


def _named_function(value: str) -> tuple[str, str]:
    """Return the file's stem and the function that a path in a setting names: FILE.py:NAME, MODULE:NAME, MODULE.NAME.

    >>> _named_function("lib/own.py:reward"), _named_function("package.own.reward"), _named_function("own.py")
    (('own', 'reward'), ('own', 'reward'), ('own', ''))
    """
    path, _, function = value.partition(":")
    if path.endswith(".py"):
        return Path(path).stem, function
    module, _, name = path.rpartition(".")
    return (path.rpartition(".")[2], function) if function else (module.rpartition(".")[2], name)


@dataclass
class StallReport:
    """What is said about a stall, and written to logs/stall.log in the run's folder. It can be sent as JSON."""

    folder: str
    resume_command: str
    timeout_s: float
    hooks: list[tuple[str, str]]
    """Settings that may name a function, with their values."""
    summary: str = ""

    @classmethod
    def of(cls, settings: Settings, folder: Path, resume_command: str) -> StallReport:
        hooks = [(key, value) for key, value in flat(settings) if isinstance(value, str) and value]
        return cls(str(folder), resume_command, settings.run.stall_timeout or 0.0, hooks)

    def write(self, driver: ProcessView, children: Sequence[ProcessView]) -> str:
        """Write the stacks of the processes to the log. Return the message that names the cause, and set `summary`."""
        try:
            cause = redact_text(str(StallCause(driver, children, self.hooks)))
        except Exception as error:
            cause = f"the cause is not known ({type(error).__name__}: {error})"
        self.summary = f"no progress for {self.timeout_s:g} s: {cause}"
        file = Path(self.folder) / "logs" / "stall.log"
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as stream:
                stream.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {self.summary}\n\n")
                stream.writelines(f"{redact_text(line)}\n" for line in _descriptions((driver, *children)))
        continuation = f"Stacks: {file}. Continue with: {self.resume_command}"
        return f"no progress for {self.timeout_s:g} s (run.stall_timeout): {cause}. {continuation}"


def _descriptions(views: Iterable[ProcessView]) -> Iterator[str]:
    """Yield lines with the state and the stacks of each process."""
    for part in map(Part, views):
        notes = "; ".join(filter(None, (STATES.get(part.view.state, ""), part.view.waits)))
        yield f"=== {part.name}{': ' + notes if notes else ''}"
        yield f"command: {part.view.command}"
        yield part.view.stacks
