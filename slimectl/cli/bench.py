"""slimectl bench"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimectl.cli.options import AsJson
from slimectl.errors import BackendError, SettingsError
from slimectl.system import stdio

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from slimectl.recipes.benchmark import BenchmarkTask
    from slimectl.runtime.benchmark import SeedResult

COLUMNS = ("seed", "accuracy", "target", "round", "CPU s", "evaluation", "wall s")
WIDTHS = (6, 8, 6, 5, 7, 10, 7)


def bench(
    tasks: Annotated[list[str] | None, typer.Argument(metavar="[TASK]…", help="Task names or TOML files")] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="N,N,…", help="Seeds to use instead of the task's")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Model for tasks that start from a pretrained one")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder for the runs. Existing runs are replaced")
    ] = Path("runs/bench"),
    as_json: AsJson = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run the preflight checks, list the tasks, and exit")
    ] = False,
) -> None:
    """Measure the CPU time to reach a fixed accuracy on fixed tasks, and this machine's speed.

    Without a task, runs all tasks that this machine supports. Each seed is a run in a new process. The time includes
    its start, but not its evaluations. The exit code is 1 if a target was not reached within the rounds of its task.

    Example:

        slimectl bench quickstart --seeds 1,2,3
    """
    from slimectl.recipes import benchmark

    names = tasks or benchmark.names()
    loaded = {name: benchmark.load(name) for name in names}
    numbers = None if seeds is None else parse_seeds(seeds)
    ready = dict(prepared(loaded, model, folder, skip_missing=not tasks, convert=not dry_run))
    if not ready:
        raise BackendError("no task can run on this machine. Install what the messages above ask for")
    if dry_run:
        for name, task in loaded.items():
            if name in ready:
                stdio.emit(f"{name:<14} {task_line(task)}")
        return
    show_machine(as_json)
    reached = [
        measure_task(loaded[name], name, values, numbers or loaded[name].target.seeds, folder, as_json)
        for name, values in ready.items()
    ]
    if not all(reached):
        raise typer.Exit(1)


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of `--seeds 1,2,3`. Raises SettingsError."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise SettingsError(f"--seeds {text}: write whole numbers separated by commas, e.g. --seeds 1,2,3") from None


def prepared(
    tasks: dict[str, BenchmarkTask], model: str | None, folder: Path, *, skip_missing: bool, convert: bool
) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield the tasks that can run, each with the settings of its model.

    A missing package or model raises BackendError. With `skip_missing`, it is logged and the task is skipped.
    """
    from slimectl.runtime.benchmark import check_prompts, model_values

    if model and not any(task.settings().model.path for task in tasks.values()):
        raise SettingsError(f"--model: {', '.join(tasks)} makes its own model. Drop --model")
    for name, task in tasks.items():
        try:
            check_prompts(task)
            yield name, model_values(task, model, folder, convert=convert)
        except BackendError as error:
            if not skip_missing:
                raise
            stdio.note(f"skipping {task.title}: {error}", level="warning")


def task_line(task: BenchmarkTask) -> str:
    """Return a line with a task's version, target, rounds and seeds."""
    target, rounds = task.target, task.settings().run.num_rollout
    seeds = ", ".join(map(str, target.seeds))
    about = f"{target.title}: " if target.title else ""
    return (
        f"version {target.version}: {about}{target.dataset} accuracy of {target.accuracy:g} within {rounds} rounds, "
        f"seeds {seeds}"
    )


def show_machine(as_json: bool) -> None:
    """Measure and print the machine."""
    from slimectl.runtime.machine import machine_speed

    machine = machine_speed()
    if as_json:
        stdio.emit(json.dumps({"kind": "machine", **asdict(machine)}))
        return
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    stdio.emit(f"machine   {machine.processor}, {stdio.quantity(machine.cores, 'core')}")
    stdio.emit(
        f"1 thread  fp32 {machine.fp32_gflops:.0f} GFLOP/s, bf16 {machine.bf16_gflops:.0f} GFLOP/s, "
        f"copy {machine.copy_gb_per_s:.1f} GB/s"
    )
    stdio.emit(f"versions  {versions}")


def measure_task(
    task: BenchmarkTask,
    name: str,
    values: dict[str, Any],
    seeds: Sequence[int],
    folder: Path,
    as_json: bool,
) -> bool:
    """Measure a task and return whether all seeds reached the target.

    Prints a row as each seed ends, then the median. The median is also printed after an error or an interrupt.
    """
    from slimectl.runtime.benchmark import TimedAccuracy, measure

    results: list[SeedResult] = []

    def note(evaluation: TimedAccuracy) -> None:
        seconds = f"{evaluation.cpu_s:.1f} CPU s"
        place = f"{task.title}, seed {seed}, round {evaluation.round}"
        stdio.note(f"{place}: accuracy {evaluation.accuracy:.3f} after {seconds}")

    if not as_json:
        stdio.emit(f"\n{task.target.name}, {task_line(task)}")
        stdio.emit(line(COLUMNS))
    try:
        for seed in seeds:
            run = {"run.dir": str(folder), "run.name": f"{task.target.name}-{task.target.version}-seed-{seed}"}
            results.append(measure(task, name, {**values, **run}, seed=seed, on_evaluation=note))
            show_result(task, results[-1], as_json)
    finally:
        if results:
            show_median(task, results, as_json)
    return all(result.reached for result in results)


def show_result(task: BenchmarkTask, result: SeedResult, as_json: bool) -> None:
    """Print the row of a seed."""
    if as_json:
        stdio.emit(json.dumps({"kind": "seed", **identity(task), **result.to_json()}))
        return
    cells = (
        str(result.seed), f"{result.accuracy:.3f}", f"{task.target.accuracy:g}", str(result.round),
        f"{'' if result.reached else '>'}{result.cpu_s:.1f}", f"{result.evaluation_cpu_s:.1f}", f"{result.wall_s:.1f}",
    )  # fmt: skip
    stdio.emit(f"{line(cells)}  {phases(result)}")


def phases(result: SeedResult) -> str:
    """Return the CPU seconds of each phase, largest first, without evaluations."""
    from slimectl.stages.round_timer import EVALUATING

    ranked = sorted(result.phases_cpu_s.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in ranked if name != EVALUATING and seconds >= 0.05)


def show_median(task: BenchmarkTask, results: Sequence[SeedResult], as_json: bool) -> None:
    """Print the median over seeds. A seed that did not reach the target counts as infinite."""
    import statistics

    cpu_s = statistics.median(result.cpu_s if result.reached else math.inf for result in results)
    reached = sum(result.reached for result in results)
    if as_json:
        median = cpu_s if math.isfinite(cpu_s) else None
        rounded = None if median is None else round(median, 4)
        counts = {"seeds": len(results), "reached": reached, "median_cpu_s": rounded}
        stdio.emit(json.dumps({"kind": "task", **identity(task), **counts}))
        return
    text = f"{cpu_s:.1f}" if math.isfinite(cpu_s) else "-"
    stdio.emit(f"{line(('median', '', '', '', text, '', ''))}  {reached} of {len(results)} reached")


def identity(task: BenchmarkTask) -> dict[str, Any]:
    """Return name, version and target of a task."""
    return {"task": task.target.name, "version": task.target.version, "target": task.target.accuracy}


def line(cells: Sequence[str]) -> str:
    """Return right-aligned cells as a line of the table."""
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()
