"""Measures the CPU seconds until a run reaches a target accuracy, in a separate process.

The figure includes the process with its imports and all its children. It excludes evaluations, so that evaluating more
often does not change the result.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slimectl import recipes
from slimectl.data.ownership import MANIFEST
from slimectl.errors import EXIT_INTERRUPTED, DiedError, SettingsError, SlimectlError, Terminated
from slimectl.plugins.containment import handle_here
from slimectl.plugins.garbage import frozen_objects
from slimectl.protocols import NoProgress
from slimectl.recipes import benchmark
from slimectl.runtime import builders
from slimectl.stages.evaluate import resolve_dataset_settings
from slimectl.stages.round_timer import EVALUATING
from slimectl.system import stdio

START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from slimectl.runtime.benchmark import main; main(int(sys.argv[2]))"
)
STARTING, REMAINDER = "start", "other"
"""Names for the time before the first phase of the run, and for the time between phases."""
GRACE_S = 20.0
"""Seconds that an interrupted run's process gets to exit before it is killed."""


@dataclass(frozen=True)
class TimedAccuracy:
    """Accuracy after a round, and the CPU seconds until then without evaluations."""

    round: int
    accuracy: float
    cpu_s: float


@dataclass
class SeedResult:
    """Result of one seed. `cpu_s` counts until the evaluation that reached the target, or until the end."""

    seed: int
    reached: bool = False
    round: int = 0
    accuracy: float = 0.0
    cpu_s: float = 0.0
    evaluation_cpu_s: float = 0.0
    wall_s: float = 0.0
    phases_cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds of the run's own process by phase. Evaluations are one phase."""
    evaluations: list[TimedAccuracy] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON, with seconds rounded to milliseconds."""
        values: dict[str, Any] = _rounded(asdict(self))
        return values


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


class PhaseClock(NoProgress):
    """CPU seconds of a run by phase. Within nested phases, time counts for the innermost one.

    `seconds` covers only this process. The time of evaluations also covers its children.
    """

    def __init__(self, cpu: Callable[[], float] = time.process_time, tree: Callable[[], float] | None = None) -> None:
        self._cpu, self._tree = cpu, tree or cpu_seconds
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.evaluation_s = 0.0
        self._open: list[str] = []
        self._mark, self._began = 0.0, False
        self._evaluations: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block for a phase. An evaluation is one phase, although each dataset enters its own."""
        evaluates = name.partition(" ")[0] == EVALUATING
        before = self._tree() if evaluates else 0.0
        if name == EVALUATING:
            self._evaluations.append(before - self.evaluation_s)
        self.charge()
        self._open.append(EVALUATING if evaluates else name)
        try:
            yield
        finally:
            self.charge()
            self._open.pop()
        if evaluates and EVALUATING not in self._open:
            self.evaluation_s += self._tree() - before

    def take_evaluations(self) -> list[float]:
        """Return the CPU seconds, without evaluations, before each evaluation since the last call."""
        marks, self._evaluations = self._evaluations, []
        return marks

    def counted(self) -> float:
        """Return the CPU seconds so far without evaluations."""
        return self._tree() - self.evaluation_s

    def charge(self) -> None:
        """Add the seconds since the last call to the current phase."""
        now = self._cpu()
        phase = self._open[-1] if self._open else REMAINDER if self._began else STARTING
        self.seconds[phase] += now - self._mark
        self._mark, self._began = now, True


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all its children, including running ones.

    Without /proc, running children are not included.
    """
    times = os.times()
    ended = times.user + times.system + times.children_user + times.children_system
    return ended + running_children_s(os.getpid())


def running_children_s(process: int, proc: Path = Path("/proc")) -> float:
    """Return the CPU seconds of the descendants of a process, including ended ones that were waited for."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for file in proc.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # the process has ended
            # The name in brackets may hold anything. Then come state, parent, …, user, system, and both of children.
            values = file.read_text(errors="replace").rpartition(")")[2].split()
            number = int(file.parent.name)
            ticks[number] = sum(map(int, values[11:15]))
            children[int(values[1])].append(number)
    total, pending = 0, [*children[process]]
    while pending:
        child = pending.pop()
        total += ticks[child]
        pending += children[child]
    return total / os.sysconf("SC_CLK_TCK")


def check_prompts(task: benchmark.BenchmarkTask) -> None:
    """Raise SettingsError if the held-out prompts have changed since the task was defined."""
    settings = resolve_dataset_settings(task.settings(), task.target.dataset)
    source = settings.eval.sources[task.target.dataset]
    actual_digest = benchmark.digest(builders.prompts(settings, [source], shuffle=False))
    if task.target.prompts_sha256 not in (None, actual_digest):
        raise SettingsError(
            f"{task.title}: {source} has different prompts than the task (SHA-256 {actual_digest}), so its "
            f"figures would not be comparable. Install the version of their library in constraints.txt."
        )


def model_values(
    task: benchmark.BenchmarkTask, model: str | None, folder: Path, *, convert: bool = True
) -> dict[str, str]:
    """Return the settings of the model: `model` if given, else the task's own model. Empty for a model card.

    A GGUF is converted into `folder` once and in advance, so that no run pays for it. Without `convert`, it is only
    searched. Raises SlimectlError if there is none.
    """
    source = model or task.settings().model.path
    if task.settings().model.path is None or source is None:
        return {}
    if not builders.is_gguf(source):
        return {"model.path": str(builders.model_folder(source))}
    target = folder / "models" / re.sub(r"\W+", "-", source).strip("-")
    builders.source_of(source)
    if convert and not (target / MANIFEST).exists():
        stdio.note(f"converting {source} to {target}")
        builders.convert_checkpoint(source, target)
    return {"model.path": str(target)}


def run_to_target(task: benchmark.BenchmarkTask, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a task in this process. Yield each evaluation, and the totals at the end, as JSON.

    The run ends at the first evaluation that reaches the target, without saving.
    """
    settings, clock = task.settings(values), PhaseClock()
    with frozen_objects():
        from slimectl.runtime.run import TrainingRun
    job = TrainingRun(settings, progress=clock)

    def evaluations() -> Iterator[TimedAccuracy]:
        marks = clock.take_evaluations()
        newest = job.recorder.evaluations[-len(marks) :] if marks else []
        for (number, metrics), cpu_s in zip(newest, marks, strict=True):
            yield TimedAccuracy(number, metrics[task.metric], cpu_s)

    reached = False
    with closing(job.reports(force=True)) as reports:
        running = True
        while running and not reached:
            try:
                next(reports)
            except StopIteration:
                running = False
            for evaluation in evaluations():
                if not reached:
                    yield asdict(evaluation)
                reached = reached or evaluation.accuracy >= task.target.accuracy
    clock.charge()
    yield {"total_cpu_s": clock.counted(), "evaluation_cpu_s": clock.evaluation_s, "phases_cpu_s": clock.seconds}


def measure(
    task: benchmark.BenchmarkTask,
    name: str,
    values: Mapping[str, Any],
    *,
    seed: int,
    on_evaluation: Callable[[TimedAccuracy], object] = lambda evaluation: None,
) -> SeedResult:
    """Run a task, given by name or file, with a seed in a separate process whose messages go to stderr.

    `on_evaluation` is called after each evaluation. An interrupt ends that process too. If it fails, SlimectlError is
    raised with its message and exit code.
    """
    request = {"task": name, "values": {**values, "run.seed": seed, "rollout.seed": seed}}
    reading, writing = os.pipe()
    package = str(Path(recipes.__file__).parents[2])
    threads = str(task.target.threads)
    started = time.perf_counter()
    with open(reading, encoding="utf-8") as lines:
        child = subprocess.Popen(
            [sys.executable, "-c", START, package, str(writing)],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=(writing,),
            env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        os.close(writing)
        try:
            assert child.stdin is not None
            with suppress(BrokenPipeError), child.stdin as stdin:
                stdin.write(json.dumps(request).encode())
            result = collect(
                map(json.loads, lines), seed=seed, accuracy=task.target.accuracy, on_evaluation=on_evaluation
            )
            code = child.wait()
        except BaseException:
            _end(child)
            raise
    if result is None:
        raise DiedError(f"{task.title}, seed {seed}: its process exited with code {code} and no message. See above.")
    result.wall_s = time.perf_counter() - started
    return result


def collect(
    lines: Iterator[dict[str, Any]],
    *,
    seed: int,
    accuracy: float,
    on_evaluation: Callable[[TimedAccuracy], object] = lambda evaluation: None,
) -> SeedResult | None:
    """Return the result from the lines of `run_to_target`, or None if they end early. Raises the error in them."""
    result = SeedResult(seed)
    for line in lines:
        if "error" in line:
            error = SlimectlError(line["error"])
            error.exit_code = line["exit_code"]
            raise error
        if "total_cpu_s" not in line:
            result.evaluations.append(TimedAccuracy(**line))
            on_evaluation(result.evaluations[-1])
            continue
        last = result.evaluations[-1] if result.evaluations else TimedAccuracy(0, 0.0, line["total_cpu_s"])
        result.reached = last.accuracy >= accuracy
        result.round, result.accuracy = last.round, last.accuracy
        result.cpu_s = last.cpu_s if result.reached else line["total_cpu_s"]
        result.evaluation_cpu_s, result.phases_cpu_s = line["evaluation_cpu_s"], line["phases_cpu_s"]
        return result
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminate the process of a run, which terminates its children. Kill it if it does not exit."""
    child.terminate()
    try:
        child.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def main(writing: int) -> None:
    """Entry point of a run's process: reads the request from stdin, and writes lines to a descriptor."""
    stdio.protect()
    stdio.log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes, and the command ends this one
    handle_here(signal.SIGTERM, _raise_terminated)
    request = json.loads(sys.stdin.read())
    os.set_inheritable(writing, False)
    with open(writing, "w", encoding="utf-8", buffering=1) as out:
        try:
            for line in run_to_target(benchmark.load(request["task"]), request["values"]):
                out.write(json.dumps(line) + "\n")
        except SlimectlError as error:
            out.write(json.dumps({"error": str(error), "exit_code": error.exit_code}) + "\n")
        except (KeyboardInterrupt, BrokenPipeError):
            os._exit(EXIT_INTERRUPTED)  # the run is closed, and asyncio would log each cancelled request


def _raise_terminated(number: int, _: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a second signal would interrupt the cleanup
    raise Terminated(number)
