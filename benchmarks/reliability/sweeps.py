"""Sweeps that are killed at any moment and repeated: is the table always that of an undisturbed sweep?

    python benchmarks/reliability/sweeps.py --seed 1 --count 10

Each mode (grid, random, halving, and Ray with --ray) is run once undisturbed. An attack kills (-9) a sweep one to
three times at random moments: the sweep's process, its runs, or first its runs and then the sweep. Then it repeats the
command to the end. It has survived if the table, best.toml and metrics.jsonl of all runs are those of the undisturbed
sweep to the last byte, nobody saw a traceback, and no process is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])  # for the fork server and all that sweeps start

from campaign import Campaign
from model_families import FAMILIES, SHAPE
from workshop import Workshop, set_up

from slimectl.checkpoints.create import create_model

BASE = """
config = "slimectl.toml"
[run]
num_rollout = 4
keep_samples = false
[eval]
interval = 2
[sweep]
metric = "rollout/raw_reward"
"""
SETTINGS = "\n[sweep.settings]\ntrain.lr = [1e-3, 3e-3, 1e-2, 3e-2]\n"
MODES = {
    "grid": f"{BASE}score = 'mean'\nseeds = [1, 2]\n[sweep.settings]\ntrain.lr = [1e-3, 1e-2]\n",
    "random": f"{BASE}method = 'random'\ntrials = 3\n[sweep.settings]\ntrain.lr = {{ low = 1e-4, high = 0.1 }}\n",
    "halving": f"{BASE}method = 'halving'\nreduction = 2\n{SETTINGS}",
    "Ray": f"{BASE}method = 'halving'\nreduction = 2\nexecutor = 'ray'\n{SETTINGS}",
}
VICTIMS = ("sweep", "runs", "runs, then the sweep")
GRACE_S = 30.0
"""How long what a sweep started may take to leave after it."""


@dataclass
class Mode:
    """A mode's undisturbed sweep: what it left, and its duration."""

    name: str
    outcome: dict[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0


class Killer:
    """Runs the attacks on one seed's choices in one folder."""

    def __init__(self, workshop: Workshop, draw: random.Random) -> None:
        self.workshop, self.draw = workshop, draw

    def start(self, name: str) -> Any:
        errors = (self.workshop.folder / f"{name}.stderr").open("ab")
        records = (self.workshop.folder / f"{name}.json").open("wb")
        with errors, records:
            arguments = ["sweep", f"{name}.toml", "--slots", "2", "--json"]
            return self.workshop.start(*arguments, stdout=records, stderr=errors, new_session=True)

    def undisturbed(self, mode: Mode) -> None:
        name = f"whole-{mode.name}"
        (self.workshop.folder / f"{name}.toml").write_text(MODES[mode.name])
        started = time.monotonic()
        code = self.start(name).wait()
        mode.duration_s = time.monotonic() - started
        assert code == 0, (self.workshop.folder / f"{name}.stderr").read_text()
        mode.outcome = self.outcome(name)

    def attack(self, mode: Mode, number: int) -> tuple[str, str]:
        """Kill a sweep one to three times and repeat it: what was done, and what is wrong."""
        name = f"attack-{number}"
        (self.workshop.folder / f"{name}.toml").write_text(MODES[mode.name])
        steps, faults = [], []
        for _ in range(self.draw.choice([1, 1, 2, 3])):
            victim, share = self.draw.choice(VICTIMS), self.draw.uniform(0.05, 0.9)
            process = self.start(name)
            wait(process, share * mode.duration_s)
            killed = self.kill_runs(name) if victim != "sweep" else 0
            if victim == VICTIMS[2]:
                wait(process, self.draw.uniform(0.0, 0.5))
            if victim != "runs":
                process.send_signal(signal.SIGKILL)
            code = process.wait()
            steps.append(f"{victim} at {share:.0%} of its time ({killed} runs killed, exit code {code})")
            if code not in (0, -signal.SIGKILL):
                faults.append(f"exit code {code}")
        if code := self.start(name).wait():
            faults.append(f"the last command ended with {code}")
        texts = [(self.workshop.folder / f"{name}.stderr").read_text(errors="replace")]
        texts += [log.read_text(errors="replace") for log in self.folder(name).glob("*/seed_*.log")]
        if any("Traceback" in text for text in texts):
            faults.append("a traceback")
        outcome = self.outcome(name)
        faults += [f"{key} differs" for key in mode.outcome if mode.outcome[key] != outcome[key]]
        faults += [f"{row}" for row in outcome["table"] if row not in mode.outcome["table"]]
        faults += [f"left behind: {line}" for line in self.leftovers()]
        return f"{mode.name}: {'; '.join(steps)}", "; ".join(faults)

    def folder(self, name: str) -> Path:
        return self.workshop.folder / "sweeps" / name

    def outcome(self, name: str) -> dict[str, Any]:
        """What has to be equal: the table, the best settings, and the metrics of every run."""
        lines = (self.workshop.folder / f"{name}.json").read_text().splitlines()
        rows = [{key: value for key, value in json.loads(line).items() if key != "folder"} for line in lines]
        folder = self.folder(name)
        best = (folder / "best.toml").read_text().replace(f"{name}.toml", "FILE")
        metrics = {
            str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.glob("*/*/metrics.jsonl"))
        }
        return {"table": rows, "best.toml": best, "metrics": metrics}

    def processes(self, word: str) -> dict[int, str]:
        """The processes of the workshop's folder whose command line has the word."""
        processes = {}
        for place in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):
                if os.readlink(place) == str(self.workshop.folder):
                    line = (place.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if word in line:
                        processes[int(place.parent.name)] = line
        return processes

    def kill_runs(self, name: str) -> int:
        pids = [pid for pid, line in self.processes(f"sweeps/{name}/").items() if " run " in line]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def leftovers(self) -> list[str]:
        """Processes that are left once there was time to leave."""
        deadline = time.monotonic() + GRACE_S
        while (left := self.processes("")) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [line[-80:] for line in left.values()]


def wait(process: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=10, help="Attacks on this machine's slots")
    parser.add_argument("--mode", action="append", default=[], choices=list(MODES), help="Only these modes")
    parser.add_argument("--ray", type=int, default=0, help="Attacks on Ray besides")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    modes_here = arguments.mode or ["halving", "grid", "random"]
    names = [modes_here[i % len(modes_here)] for i in range(arguments.count)] + ["Ray"] * arguments.ray
    campaign = Campaign("killed sweeps", seed=arguments.seed)
    with tempfile.TemporaryDirectory(prefix="slimectl-sweeps-") as folder:
        root = Path(folder).resolve()
        (root / "model").mkdir()
        (root / "work").mkdir()
        create_model(SHAPE | FAMILIES["llama"], root / "model", seed=7)
        killer = Killer(set_up(root / "work", root / "model"), draw)
        killer.workshop.start("--version", stdout=subprocess.DEVNULL).wait()  # the fork server imports
        modes: dict[str, Mode] = {}
        for number, name in enumerate(names, 1):
            if name not in modes:
                modes[name] = Mode(name)
                killer.undisturbed(modes[name])
            attack, faults = killer.attack(modes[name], number)
            campaign.record(name, attack, survived=not faults, observation=faults)
            print(
                f"{number}/{len(names)} {'FAILED ' + faults if faults else 'ok'}: {attack}", file=sys.stderr, flush=True
            )
    return campaign.finish()


if __name__ == "__main__":
    raise SystemExit(main())
