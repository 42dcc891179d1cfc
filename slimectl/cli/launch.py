"""slimectl launch"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slimectl.cli.options import SETTINGS, CommonOptions, with_options
from slimectl.errors import BackendError, CheckpointError, SettingsError, first_line
from slimectl.system import stdio
from slimectl.system.stdio import quantity

if TYPE_CHECKING:
    from slimectl.launchers.job import Job
    from slimectl.settings import Settings

Target = Literal["local", "ray", "slurm", "kubernetes", "skypilot"]
COMMANDS = {
    "local": ["bash"],
    "ray": ["bash"],
    "slurm": ["sbatch"],
    "kubernetes": ["kubectl", "create", "-f"],
    "skypilot": ["sky", "jobs", "launch", "--yes", "--detach-run"],
}
"""Command that submits a job file."""
HERE = ("local", "ray", "slurm")
"""Targets whose jobs start in the current folder."""


@with_options(SETTINGS, "recipe on name out submit", "force")
def launch(
    options: CommonOptions,
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Recipe name or settings file")] = None,
    on: Annotated[
        Target, typer.Option("--on", help="Scheduler: local, ray, slurm, kubernetes (KubeRay) or skypilot")
    ] = "slurm",
    name: Annotated[str | None, typer.Option("--name", help="Name of the run's folder in run.dir")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the job to a file")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job, after checking that the run fits")] = False,
) -> None:
    """Write a run as a job for a scheduler, and submit it with --submit.

    The job starts the run, or resumes it if its folder exists. It saves and starts again before its time limit, after a
    preemption and after the loss of a machine. [cluster] decides the number of machines and GPUs, [launch] the rest.

    Example:

        slimectl launch qwen3-8b-8xh100 --on slurm -s launch.partition=gpu -o job.sh
    """
    from slimectl import recipes
    from slimectl.data.atomic_replace import write_text
    from slimectl.data.ownership import MANIFEST
    from slimectl.launchers.job import job_of
    from slimectl.runtime import builders

    selected = recipes.find(recipe, instead=bool(options.config), needed=not options.config)
    flags = {"run.name": name, "cluster.executor": "ray" if on in ("ray", "kubernetes") else None}
    settings = options.resolve(flags, recipe=selected.layer).settings
    is_file = recipe is not None and recipe not in recipes.names()
    files = [*([Path(recipe)] if recipe and is_file else []), *(options.config or [])]
    if on not in HERE:
        _check_elsewhere(files)
    given = [] if recipe is None else [_path(Path(recipe)) if is_file else recipe]
    given += [part for path in options.config or [] for part in ("-c", _path(path))]
    assigned = [part for value in options.assign or [] if not value.startswith("launch.") for part in ("-s", value)]
    given += [*assigned, *(["--name", name] if name else [])]
    placement = replace(builders.placement(settings), on_gpu=settings.train.device != "cpu")
    job = job_of(settings, tuple(given), Path.cwd(), placement)
    if on in HERE and (Path(job.run) / MANIFEST).exists():
        job = replace(job, changes=tuple(assigned))
        own = "its own settings and -s" if assigned else "its own settings"
        stdio.note(f"{job.run}: already exists. The job resumes it with {own}. For a new run, add --name.")
    text = render(on)(job)
    if out is not None:
        if out.exists() and not options.force:
            raise SettingsError(f"{out}: already exists. Add --force to replace it")
        write_text(out, text)
        stdio.note(f"{out}: {summary(job)}")
    else:
        stdio.emit(text.rstrip("\n"))
    if submit:
        check_fit(settings, force=options.force)
        file = out or _kept(job, on, text)
        submit_file(on, file, secrets=settings.launch.env)


def _check_elsewhere(files: list[Path]) -> None:
    """Check that a job in another place has its settings. Raises SettingsError for a file outside of this folder."""
    from slimectl.settings.layers import from_environment

    if outside := next((file for file in files if not file.resolve().is_relative_to(Path.cwd())), None):
        raise SettingsError(f"{outside}: the job has only the files of this folder. Copy the file here.")
    if variables := from_environment().variables.values():
        stdio.say(f"the job does not get {', '.join(variables)} from this environment. Use -s or a settings file")


def _path(path: Path) -> str:
    """Return a path below this folder as relative to it, and any other one as absolute."""
    return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path.absolute())


def render(on: Target) -> Callable[[Job], str]:
    """Return the function that writes a job for a scheduler."""
    from slimectl.launchers import manifests, shell

    return {
        "local": shell.local_script,
        "ray": shell.ray_script,
        "slurm": shell.slurm_script,
        "kubernetes": manifests.ray_job_manifest,
        "skypilot": manifests.sky_task,
    }[on]


def summary(job: Job) -> str:
    """Return the size of a job in a few words."""
    gpus = f" with {quantity(job.gpus_per_node, 'GPU')} each" if job.gpus_per_node else " without GPUs"
    return f"{quantity(job.nodes, 'machine')}{gpus}, run {job.run}"


def check_fit(settings: Settings, *, force: bool) -> None:
    """Raise SettingsError if the run does not fit into launch.gpu_memory_gib by `slimectl plan`, unless `force`."""
    from slimectl.cli.plan import with_card
    from slimectl.planner import plan
    from slimectl.runtime import capacity

    if force or settings.train.device == "cpu":
        return
    try:
        planned = capacity.planned_run(with_card(settings), device="cuda")
        plan.check(planned.shape, planned.run)
    except (CheckpointError, SettingsError) as error:
        stdio.note(f"memory not checked: {first_line(error)}")
        return
    memory = settings.launch.gpu_memory_gib
    if not plan.plan_run(planned, memory_gib=memory).fits:
        raise SettingsError(
            f"the run does not fit into {memory:g} GiB per GPU (launch.gpu_memory_gib). See `slimectl plan`, or add "
            f"--force"
        )


def _kept(job: Job, on: Target, text: str) -> Path:
    """Write a job next to the runs, so that it can be submitted again."""
    from slimectl.data.atomic_replace import storage_errors, write_text

    suffix = "yaml" if on in ("kubernetes", "skypilot") else "sh"
    file = Path(job.run).parent / f"{job.label}.{on}.{suffix}"
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text)
    return file


def submit_file(on: Target, file: Path, *, secrets: list[str]) -> None:
    """Submit a job file with the scheduler's own command. Its output is shown."""
    names = [part for name in secrets for part in ("--secret", name)] if on == "skypilot" else []
    command = [*COMMANDS[on], *names, str(file)]
    stdio.note(f"submitting: {shlex.join(command)}")
    try:
        code = subprocess.run(command).returncode
    except FileNotFoundError:
        raise BackendError(f"{command[0]}: not found. On a machine that has it: {shlex.join(command)}") from None
    if code:
        raise typer.Exit(code)
