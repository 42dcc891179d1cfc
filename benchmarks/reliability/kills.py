"""Runs that are killed at any moment, by any signal, once to three times, and resumed: is the end always the same?

    python benchmarks/reliability/kills.py --seed 1 --count 60
    python benchmarks/reliability/kills.py --seed 1 --part folders

Each mode (plain, over-sampling, partial rollouts, warm-up, two ranks, Megatron, servers, Ray, and `train` on
demonstrations and on preferences) is run once undisturbed.
An attack then kills a run of that mode at a named point (an open, rename, mkdir or removal in its folder) or at a
random moment, and resumes it. It has survived if no exit code but a documented one was seen, nobody saw a traceback,
metrics, weights, optimizer and state are those of the undisturbed run to the last bit, `latest` is right, and no
process, half-written file or shared memory is left. The part `folders` is in odd_folders.py and odd_targets.py.
"""

from __future__ import annotations

import argparse
import hashlib
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
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])  # for the fork server and all that runs start

from campaign import Campaign
from conftest import FAMILIES, SHAPE
from forkserver import ForkedProcess
from workshop import SETTINGS, Workshop, alike, set_up

from slimectl.checkpoints.create import create_model

REWARD = '''
import os, signal, sys
from pathlib import Path

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.truncate")
run, at, number, log = (os.environ.get(name, "") for name in ("POINT_RUN", "POINT_AT", "POINT_SIGNAL", "POINT_LOG"))
count, busy = 0, False


def watch(event, arguments):
    """Count what happens in the run's folder; end the process at one of these points."""
    global count, busy
    if busy or event not in EVENTS or not isinstance(arguments[0], (str, bytes, os.PathLike)):
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITING):
        return
    path = arguments[1] if event == "os.symlink" else arguments[0]
    if not os.path.abspath(os.fsdecode(path)).startswith(run):
        return
    busy = True
    if log:
        with open(log, "a") as file:
            print(event, os.fsdecode(path), file=file)
    count += 1
    busy = False
    if at and count == int(at):
        os.kill(os.getpid(), int(number))
        busy = True
        open(run + ".struck", "w").close()
        busy = False


if run:
    sys.addaudithook(watch)


def reward(sample):
    answer = sample.tokens[len(sample.tokens) - sample.response_length:]
    return sum(token < 64 for token in answer) / len(answer)


def not_all(args, samples):
    rewards = {sample.reward for sample in samples}
    return len(rewards) > 1, "alike"
'''

FILTER = ["-s", "rollout.dynamic_sampling_filter_path=reward.py:not_all", "-s", "rollout.over_sampling_batch_size=7"]
PARTIAL = ["-s", "rollout.partial_rollout=true", "-s", "rollout.mask_offpolicy_in_partial_rollout=true"]
WARMUP = [
    "-s", "model.path=none", "-s", "model.card=tiny", "-s", "sft_warmup.data=['prompts.jsonl']",
    "-s", "sft_warmup.max_steps=4", "-s", "sft_warmup.check_interval=2", "-s", "sft_warmup.target_accuracy=1",
    "-s", "sft_warmup.batch_size=8",
]  # fmt: skip
SERVER = ["--engines", "2", "-s", "sync.transport=tensor"]
EPOCHS = ["-s", "run.num_rollout=none", "-s", "run.num_epoch=2", "-s", "run.rollout_batch_size=3"]
MODES: dict[str, tuple[list[str], int]] = {
    "plain": ([], 8),
    "over-sampling": (FILTER, 4),
    "partial rollouts": ([*FILTER, *PARTIAL], 4),
    "warm-up from a card": (WARMUP, 4),
    "Megatron": (["--backend", "megatron"], 4),
    "two ranks": (["-s", "cluster.actor_num_gpus_per_node=2"], 2),
    "servers": (SERVER, 2),
    "SFT": (["--algorithm", "sft", *EPOCHS], 4),
    "DPO": (["--algorithm", "dpo", *EPOCHS], 4),
    "Ray": (["--executor", "ray"], 0),
}
"""Options of each mode, and how many of 36 attacks it gets."""
FILES = {"SFT": "prompts.jsonl", "DPO": "preferences.jsonl"}
"""Samples of the modes that train on a file."""

SIGNALS = {
    "KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "HUP": signal.SIGHUP, "INT": signal.SIGINT,
    "INT twice": signal.SIGINT, "STOP then KILL": signal.SIGSTOP,
}  # fmt: skip
DOCUMENTED = {0, 129, 130, 143, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP}
"""By a signal itself where it comes before the command handles it, or while the interpreter cleans up."""
GRACE_S = 30.0
"""How long what a run started may take to leave after it."""


@dataclass
class Mode:
    """A mode's undisturbed run: its outcome, the points at which it could have been killed, and its duration."""

    name: str
    options: list[str]
    outcome: dict[str, Any] = field(default_factory=dict)
    points: list[str] = field(default_factory=list)
    duration_s: float = 0.0

    def command(self, run: str, *, begun: bool) -> list[str]:
        """Start a run, or resume one that has begun."""
        stage = ["train", FILES[self.name], "-c", "slimectl.toml"] if self.name in FILES else ["run"]
        return [stage[0], "--resume", f"runs/{run}"] if begun else [*stage, "--name", run, *self.options]


class Killer:
    """Runs the attacks on one seed's choices in one folder."""

    def __init__(self, workshop: Workshop, draw: random.Random) -> None:
        self.workshop, self.draw = workshop, draw
        self.words = ""

    def start(self, arguments: list[str], run: str, at: int | None, number: int, *, log: Path | None = None) -> Any:
        environment = {"POINT_RUN": str(self.workshop.folder / "runs" / run), "POINT_LOG": str(log or "")}
        environment |= {"POINT_AT": str(at or ""), "POINT_SIGNAL": str(int(number))}
        os.environ.update(environment)
        stderr = (self.workshop.folder / f"{run}.stderr").open("ab")
        with stderr:
            return self.workshop.start(*arguments, stdout=subprocess.DEVNULL, stderr=stderr, new_session=True)

    def undisturbed(self, mode: Mode) -> None:
        run, log = f"whole-{mode.name.replace(' ', '-')}", self.workshop.folder / "points"
        log.unlink(missing_ok=True)
        started = time.monotonic()
        code = self.start(mode.command(run, begun=False), run, None, 0, log=log).wait()
        mode.duration_s = time.monotonic() - started
        assert code == 0, (self.workshop.folder / f"{run}.stderr").read_text()
        mode.outcome = outcome(self.workshop.folder / "runs" / run)
        mode.points = log.read_text().splitlines()

    def attack(self, mode: Mode, number: int) -> tuple[str, str]:
        """Kill a run once to three times and resume it; what was done, and what is wrong."""
        run = f"attack-{number}"
        before = shared_memory()
        steps, faults = [], []
        for _ in range(self.draw.choice([1, 1, 2, 3])):
            name = self.draw.choice(list(SIGNALS))
            begun = (self.workshop.folder / "runs" / run / "run.toml").exists()
            command = mode.command(run, begun=begun)
            code, place = self._killed(command, run, mode, name)
            steps.append(f"{name} at {place} ({code})")
            if code not in DOCUMENTED:
                faults.append(f"exit code {code} after {name}")
        begun = (self.workshop.folder / "runs" / run / "run.toml").exists()
        command = mode.command(run, begun=begun)
        code = self.start(command, run, None, 0).wait()
        words = (self.workshop.folder / f"{run}.stderr").read_text(errors="replace")
        if code:
            faults.append(f"the last resume ended with {code}: {words.splitlines()[-1:]}")
        if "Traceback" in words:
            faults.append("a traceback: " + " | ".join(words[words.index("Traceback") :].splitlines()[:40]))
        if not code:
            faults += differences(
                mode.outcome, outcome(self.workshop.folder / "runs" / run), exact=mode.name != "servers"
            )
        faults += [f"left behind: {left}" for left in self.leftovers(before)]
        return f"{mode.name}: {'; '.join(steps)}", "; ".join(faults)

    def _killed(self, command: list[str], run: str, mode: Mode, name: str) -> tuple[int, str]:
        """Run a command until it is killed; its exit code and where that was."""
        number = SIGNALS[name]
        if self.draw.random() < 0.6:
            kinds = sorted({kind(point) for point in mode.points})
            wanted = self.draw.choice(kinds)
            at = self.draw.choice([i for i, point in enumerate(mode.points, 1) if kind(point) == wanted])
            place = wanted
            self._struck(run).unlink(missing_ok=True)
            process = self.start(command, run, at, number)
            delay = None
        else:
            delay = self.draw.uniform(0.02, 1.0) * mode.duration_s
            place = f"{delay / mode.duration_s:.0%} of its time"
            process = self.start(command, run, None, 0)
        self._finish(process, name, delay, self._struck(run))
        return process.wait(), place

    def _struck(self, run: str) -> Path:
        """The file that says that a process has sent itself its signal."""
        return self.workshop.folder / "runs" / f"{run}.struck"

    def _finish(self, process: ForkedProcess, name: str, delay: float | None, struck: Path) -> None:
        """Send the signal after `delay`, or wait until the process does so itself; then what else belongs to it."""
        if delay is not None:
            deadline = time.monotonic() + delay
            while time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.005)
            process.send_signal(SIGNALS[name])
        if name == "INT twice":
            while delay is None and process.poll() is None and not struck.exists():
                time.sleep(0.005)
            time.sleep(self.draw.uniform(0.0, 0.3))
            process.send_signal(signal.SIGINT)
        if name == "STOP then KILL":
            while process.poll() is None and status_of(process.pid) != "T":
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)

    def leftovers(self, before: set[str]) -> list[str]:
        """Processes of the workshop's folder, and shared memory that nobody has open, once there was time to leave."""
        deadline = time.monotonic() + GRACE_S
        while (left := self._left(before)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left(self, before: set[str]) -> list[str]:
        processes = []
        for place in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):  # another user's, gone already, or in a folder of too long a name
                if os.readlink(place) == str(self.workshop.folder) and status_of(int(place.parent.name)) != "Z":
                    command = (place.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    processes.append(f"process {place.parent.name} {command[-60:]}")
        return processes + sorted(orphaned(shared_memory() - before))


def kind(point: str) -> str:
    """A point without the numbers of its round: rename .tmp-step_N."""
    event, _, path = point.partition(" ")
    name = "/".join(Path(path).parts[-2:])
    return f"{event.removeprefix('os.')} " + "".join("N" if c.isdigit() else c for c in name).replace("NNNNNN", "N")


def outcome(run: Path) -> dict[str, Any]:
    """What has to be equal: metrics, weights, optimizer, state, `latest`, and that nothing half-made is there."""
    last = run / "latest"
    state = json.loads((last / "state.json").read_text())
    state["sizes"] = state["sizes"].get("metrics.jsonl")
    digests = {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted((run / os.readlink(last)).rglob("*.safetensors"))
    }
    half_made = sorted(child.name for child in run.glob(".*"))
    signed = "finished" in json.loads((run / "manifest.json").read_text())
    names = sorted(child.name for child in run.iterdir())
    metrics = (run / "metrics.jsonl").read_text()
    return {
        "metrics": metrics, "latest": os.readlink(last), "state": state, "weights": digests, "half-made": half_made,
        "signed": signed, "names": names,
    }  # fmt: skip


def differences(expected: dict[str, Any], actual: dict[str, Any], *, exact: bool) -> list[str]:
    """What differs; not `exact`: several servers share requests as they come, so two runs are equal within rounding."""
    if not exact:
        one, other = ([json.loads(line) for line in it["metrics"].splitlines()] for it in (expected, actual))
        try:
            alike(one, other)
        except AssertionError as error:
            return [f"metrics differ: {error}"]
        expected = {name: expected[name] for name in ("latest", "half-made", "signed", "names")}
    return [f"{name} differ" for name in expected if expected[name] != actual[name]]


def status_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def orphaned(names: set[str]) -> set[str]:
    """The blocks that no process has mapped or open: another user's have one."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if not names:
            break
        try:
            text = maps.read_text()
        except OSError:
            continue
        names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names


def chosen_modes(count: int, draw: random.Random, only: list[str], ray: int) -> list[str]:
    """The mode of each attack, in proportion."""
    shares = {name: share for name, (_, share) in MODES.items() if share and (not only or name in only)}
    names = [name for name, share in shares.items() for _ in range(max(1, round(count * share / sum(shares.values()))))]
    names = [*names[:count], *["Ray"] * ray]
    draw.shuffle(names)
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60, help="Attacks that kill")
    parser.add_argument("--ray", type=int, default=0, help="Attacks on runs under Ray besides")
    parser.add_argument("--mode", action="append", default=[], choices=list(MODES), help="Only these modes")
    parser.add_argument("--part", choices=["kills", "folders"], default="kills")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="slimectl-kills-") as name:
        folder = Path(name).resolve()
        (folder / "model").mkdir()
        (folder / "work").mkdir()
        create_model(SHAPE | FAMILIES["llama"], folder / "model", seed=7)
        workshop = set_up(folder / "work", folder / "model")
        if arguments.part == "folders":
            from odd_folders import attack_folders
            from odd_targets import attack_targets

            campaign = Campaign("odd folders", seed=arguments.seed)
            attack_folders(workshop, draw, campaign)
            attack_targets(workshop, campaign)
            return campaign.finish()
        (workshop.folder / "reward.py").write_text(REWARD)
        pairs = [
            {"prompt": f"say {word}", "chosen": word, "rejected": "no"} for word in ("one", "two", "three", "four")
        ]
        (workshop.folder / "preferences.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        text = SETTINGS.format(model=folder / "model").replace("num_rollout = 6", "num_rollout = 4")
        (workshop.folder / "slimectl.toml").write_text(
            text.replace('keep_checkpoints = "none"', "keep_checkpoints = 2")
        )
        names = chosen_modes(arguments.count, draw, arguments.mode, arguments.ray)
        return attack_runs(Killer(workshop, draw), names, arguments.seed)


def attack_runs(killer: Killer, names: list[str], seed: int) -> int:
    campaign = Campaign("killed runs", seed=seed)
    modes: dict[str, Mode] = {}
    killer.start(["--version"], "none", None, 0).wait()  # the fork server imports: no part of a run's duration
    for number, name in enumerate(names):
        if name not in modes:
            modes[name] = Mode(name, MODES[name][0])
            killer.undisturbed(modes[name])
        attack, faults = killer.attack(modes[name], number)
        campaign.record(name, attack, survived=not faults, observation=faults)
        print(
            f"{number + 1}/{len(names)} {'FAILED ' + faults if faults else 'ok'}: {attack}", file=sys.stderr, flush=True
        )
    return campaign.finish()


if __name__ == "__main__":
    raise SystemExit(main())
