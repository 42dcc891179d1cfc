"""Odd run folders: is every file of the user's still there, byte for byte?

With odd_targets.py the part `folders` of kills.py. Each folder meets `run`, `run --force` and `run --resume`. Survived:
an exit code of 0, 1, 2 or 4, no traceback, at most a few lines, and every file that the user put there, links included,
is what it was.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from campaign import Campaign
from workshop import SETTINGS, Workshop

NOTES = {"notes.txt": b"mine\n", "data/deep/table.csv": b"a,b\n1,2\n", "notes.jsonl": b'{"mine": 1}\n' * 40}
TINY = ["-s", "run.num_rollout=1", "-s", "eval.data={}", "-s", "run.save_interval=1"]
COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "run": lambda name: ["run", "--name", name, *TINY],
    "run --force": lambda name: ["run", "--name", name, "--force", *TINY],
    "run --resume": lambda name: ["run", "--resume", f"runs/{name}", *TINY],
}
EXPECTED = {0, 1, 2, 4}
MOST_LINES = 12


@dataclass
class Case:
    """One folder `runs/NAME` in a workshop; `users` are the paths of what is the user's."""

    workshop: Workshop
    template: Path
    name: str
    users: list[Path] = field(default_factory=list)
    endings: list[Callable[[], object]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.workshop.folder / "runs" / self.name

    def put(self, path: Path, content: bytes | str = b"mine\n") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.users.append(path)
        return path

    def link(self, path: Path, target: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
        self.users.append(path)

    def notes(self, folder: Path) -> None:
        for name, content in NOTES.items():
            self.put(folder / name, content)

    def ours(self, folder: Path | None = None) -> Path:
        """A finished run of ours in the folder."""
        folder = folder or self.run
        shutil.copytree(self.template, folder, symlinks=True)
        return folder

    def elsewhere(self, name: str = "elsewhere") -> Path:
        return self.workshop.folder / f"{name}-{self.name}"


Base = Callable[[Case], object]
BASES: dict[str, Base] = {}


def base(build: Base) -> Base:
    BASES[build.__name__.replace("_", " ")] = build
    return build


@base
def a_users_folder_with_a_run_toml(case: Case) -> None:
    case.put(case.run / "run.toml", "# the plan for my run to the lake\n[model]\n")
    case.notes(case.run)


@base
def a_users_folder_with_settings_of_ours(case: Case) -> None:
    case.put(case.run / "run.toml", SETTINGS.format(model=case.workshop.model))
    case.put(case.run / "metrics.jsonl", b'{"my own": "measurements"}\n' * 20)
    case.put(case.run / "perf.jsonl", b"not even JSON\n")
    case.notes(case.run)


@base
def settings_of_ours_and_metrics_like_ours_with_a_users_step(case: Case) -> None:
    case.put(case.run / "run.toml", SETTINGS.format(model=case.workshop.model))
    case.put(case.run / "metrics.jsonl", b'{"step": 1, "metrics": {}}\n' * 20)
    case.put(case.run / "step_000001" / "policy" / "model.safetensors", b"a model of mine")
    case.put(case.run / ".tmp-step_000002" / "draft.txt")


@base
def a_users_folder_without_run_toml(case: Case) -> None:
    case.notes(case.run)
    case.put(case.run / "latest", b"news\n")


@base
def a_users_folder_with_reserved_names(case: Case) -> None:
    for name in ("model/mine.bin", "eval/a.jsonl", "logs/rank-0.log", "warmup/x", "tensorboard/events.out.tfevents.1"):
        case.put(case.run / name)
    case.put(case.run / "run.toml", "")


@base
def a_folder_with_another_programs_manifest(case: Case) -> None:
    case.put(case.run / "manifest.json", json.dumps({"name": "an extension", "manifest_version": 3}))
    case.put(case.run / "run.toml", SETTINGS.format(model=case.workshop.model))
    case.notes(case.run)


@base
def a_folder_with_a_binary_manifest(case: Case) -> None:
    case.put(case.run / "manifest.json", os.urandom(500))
    case.put(case.run / "run.toml", "x = 1\n")


@base
def an_empty_folder(case: Case) -> None:
    case.run.mkdir(parents=True)


@base
def our_run_with_a_users_files_among_it(case: Case) -> None:
    case.ours()
    case.notes(case.run)
    for name in ("step_000001/analysis.txt", "step_000001/policy/mine.bin", "eval/mine.txt", "logs/mine.txt", ".tmp-x"):
        case.put(case.run / name)


@base
def our_run_with_a_line_of_odd_names(case: Case) -> None:
    case.ours()
    for name in ("a\nb", "ünïcode 🐍", "-rf", " ", "step_x", "step_1", "metrics.jsonl.bak", "run.toml~", ".hidden"):
        case.put(case.run / name)


@base
def our_run_that_failed_early_with_notes(case: Case) -> None:
    case.ours()
    for name in ("metrics.jsonl", "perf.jsonl", "latest"):
        (case.run / name).unlink()
    shutil.rmtree(case.run / "step_000001")
    case.notes(case.run)


@base
def our_run_of_an_older_version_with_notes(case: Case) -> None:
    case.ours()
    (case.run / "manifest.json").unlink()
    case.notes(case.run)


@base
def a_run_folder_that_is_a_link_to_a_users_folder(case: Case) -> None:
    case.notes(case.elsewhere())
    case.put(case.elsewhere() / "run.toml", "x = 1")
    case.link(case.run, case.elsewhere())


@base
def a_run_folder_that_is_a_link_to_our_run(case: Case) -> None:
    case.ours(case.elsewhere())
    case.notes(case.elsewhere())
    case.link(case.run, case.elsewhere())


@base
def a_dangling_link(case: Case) -> None:
    case.link(case.run, case.elsewhere())


@base
def a_checkpoint_moved_away_and_linked(case: Case) -> None:
    case.ours()
    (case.run / "step_000001").rename(case.elsewhere())
    case.users += [file for file in case.elsewhere().rglob("*") if file.is_file()]
    case.link(case.run / "step_000001", case.elsewhere())


@base
def a_latest_that_is_a_users_folder(case: Case) -> None:
    case.ours()
    (case.run / "latest").unlink()
    case.notes(case.run / "latest")


@base
def metrics_that_are_a_link_to_a_users_file(case: Case) -> None:
    case.ours()
    (case.run / "metrics.jsonl").unlink()
    case.link(case.run / "metrics.jsonl", case.put(case.elsewhere(), b'{"step": 1, "metrics": {}}\n' * 100))


@base
def eval_and_logs_that_are_links(case: Case) -> None:
    case.ours()
    for name in ("eval", "logs"):
        shutil.rmtree(case.run / name, ignore_errors=True)
        case.put(case.elsewhere(name) / "small-000001.jsonl")
        case.link(case.run / name, case.elsewhere(name))


@base
def an_interrupted_replacement_with_a_users_file(case: Case) -> None:
    case.ours()
    shutil.copytree(case.run / "step_000001", case.run / ".old-step_000001")
    (case.run / ".old-step_000001" / "mine.txt").write_bytes(b"mine\n")
    shutil.rmtree(case.run / "step_000001")


@base
def a_lock_of_a_living_process(case: Case) -> None:
    case.ours()
    held(case, case.run / ".slimectl.lock")


@base
def a_lock_of_a_dead_process(case: Case) -> None:
    case.ours()
    facts = {"mark": "slimectl lock", "host": socket.gethostname(), "pid": 1, "since": "", "boot": "x", "ticks": 7}
    (case.run / ".slimectl.lock").write_text(json.dumps(facts))
    case.notes(case.run)


@base
def a_lock_left_by_another_host(case: Case) -> None:
    case.ours()
    facts = {"mark": "slimectl lock", "host": "another", "pid": 77, "since": "1999", "boot": "x", "ticks": 7}
    (case.run / ".slimectl.lock").write_text(json.dumps(facts))


@base
def a_users_file_with_the_name_of_the_lock(case: Case) -> None:
    case.ours()
    case.put(case.run / ".slimectl.lock", b"my notes about locks\n")


@base
def a_lock_that_is_a_link(case: Case) -> None:
    case.ours()
    case.link(case.run / ".slimectl.lock", case.put(case.elsewhere()))


@base
def a_run_folder_that_is_a_file(case: Case) -> None:
    case.put(case.run)


@base
def a_run_folder_that_is_a_fifo(case: Case) -> None:
    case.run.parent.mkdir(exist_ok=True)
    os.mkfifo(case.run)


@base
def a_read_only_file_system(case: Case) -> None:
    mounted(case, "ro")


@base
def a_full_file_system(case: Case) -> None:
    mounted(case, "full")


def mounted(case: Case, how: str) -> None:
    """Put our run and a user's notes on a small file system of their own. Raises OSError where that cannot be."""
    case.run.mkdir(parents=True)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(case.run)], capture_output=True
    ).returncode:
        case.run.rmdir()
        raise OSError("nothing can be mounted here")
    case.endings.append(lambda: subprocess.run(["umount", "-l", str(case.run)], check=True))
    shutil.copytree(case.template, case.run, symlinks=True, dirs_exist_ok=True)
    case.notes(case.run)
    if how == "ro":
        subprocess.run(["mount", "-o", "remount,ro", str(case.run)], check=True)
        return
    with suppress(OSError), (case.run / "ballast").open("wb", buffering=0) as ballast:
        case.users.append(case.run / "ballast")
        while ballast.write(bytes(4096)) == 4096:
            pass


def held(case: Case, lock: Path) -> None:
    """A process that holds a lock until the case ends."""
    from slimectl.data.locks import Lock

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with Lock(lock, "held"):
            os.write(writing, b"x")
            signal.pause()
    os.read(reading, 1)
    case.users.append(case.run / "metrics.jsonl")

    def end() -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    case.endings.append(end)


def attack_folders(workshop: Workshop, draw: random.Random, campaign: Campaign) -> None:
    """Every base folder under every command, in an order drawn from the seed."""
    workshop.slimectl("run", "--name", "template", *TINY)
    with tempfile.TemporaryDirectory() as name:
        template = Path(name) / "template"
        shutil.move(workshop.folder / "runs" / "template", template)
        attacks = [(title, command) for title in BASES for command in COMMANDS]
        draw.shuffle(attacks)
        for number, (title, command) in enumerate(attacks):
            case = Case(workshop, template, f"odd-{number}")
            try:
                BASES[title](case)
                faults = attacked(case, COMMANDS[command](case.name))
            except OSError as error:
                print(f"left out: {title}: {error}")
                continue
            finally:
                for end in case.endings:
                    end()
            campaign.record(command, title, survived=not faults, observation="; ".join(faults))


def attacked(case: Case, command: list[str]) -> list[str]:
    """What is wrong after a command met a folder."""
    before = {path: content(path) for path in case.users}
    process = case.workshop.start(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    words = process.communicate()[1].decode(errors="replace")
    faults = [f"{path.name} is not what it was" for path in before if content(path) != before[path]]
    if process.returncode not in EXPECTED:
        faults.append(f"exit code {process.returncode}: {words[-200:]}")
    if "Traceback" in words:
        faults.append("a traceback: " + " | ".join(words[words.index("Traceback") :].splitlines()[-6:]))
    if process.returncode and len([line for line in words.splitlines() if line.startswith("slimectl: ")]) != 1:
        faults.append(f"not one line: {words[-300:]}")
    return faults


def content(path: Path) -> object:
    """A file's bytes, a link's target; None for what is not there."""
    if path.is_symlink():
        return os.readlink(path)
    return path.read_bytes() if path.is_file() else None
