"""Engines that are killed, terminated, removed and added at random while a run samples: is every sample there once?

    python benchmarks/reliability/elastic.py --seed 1 --changes 50

Each mode (how far sampling runs ahead, and how weights travel) is one run with two engines of `slimectl serve`. Events
are drawn from the seed until engines have joined and left `--changes` times in all. Then the run is interrupted after
its round, and the same number of rounds is run again without events. The run has survived if

- every round has its line in metrics.jsonl and perf.jsonl, with the weight version of the undisturbed run,
- every (group, index) of the undisturbed run's sample files is there once, in a round of the same size (if sampling
  runs ahead, groups end in another order: each is there whole and once, except the last ones in flight),
- no sample is older than run.async_level allows, or failed,
- the first request of every engine found weights that are as new as those of any engine asked before it,
- no process is left.

A middleware in the servers writes the weight versions. How far metrics and tokens differ is printed: servers batch
requests as they come, so two undisturbed runs differ in the last digits, and with run.async_level in their samples.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support" / "cpu"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])  # for the fork server and all that runs start

import psutil
from campaign import Campaign
from conftest import FAMILIES, SHAPE
from workshop import BY_ENGINE, Workshop, set_up

from slimectl.checkpoints.create import create_model
from slimectl.data.engine_requests import EngineRow, read_state

MODES = {
    "in step, shared memory": ["run.async_level=0", "sync.transport=tensor"],
    "one ahead, disk": ["run.async_level=1", "sync.transport=disk"],
    "two ahead, delta": ["run.async_level=2", "sync.transport=delta"],
    "two ahead, shared memory": ["run.async_level=2", "sync.transport=tensor"],
    "one ahead, broadcast": ["run.async_level=1", "sync.transport=distributed"],
}
SETTINGS = [
    "engine.num_engines=2", "engine.max_restarts=1000", "engine.middleware_paths=['watch.py:first_requests']",
    "rollout.max_response_len=150", "run.save_interval=20", "eval.interval=1000", "train.lr_decay_style=constant",
    "track.timeline=false",
]  # fmt: skip
FEWEST, MOST = 2, 4
"""Engines that events leave, and that they add up to."""
EVENTS = {"kill": 3, "terminate": 2, "add": 3, "remove": 2, "remove at once": 1}
"""How often each event is drawn."""
LONGEST_S = 3600.0

REWARD = '''
def reward(sample):
    """The share of small bytes in the answer, which may be empty."""
    answer = sample.tokens[len(sample.tokens) - sample.response_length:]
    return sum(token < 64 for token in answer) / max(1, len(answer))
'''
WATCH = '''
import json, os, time
from aiohttp import web
from slimectl.engines.server.state import SERVICE

asked = 0

@web.middleware
async def first_requests(request, handler):
    """Write the weights that the first requests of this server find and leave, and those of every tenth."""
    global asked
    if not request.path.startswith("/generate"):
        return await handler(request)
    asked += 1
    number, engine = asked, request.app[SERVICE].thread.engine
    line = {"pid": os.getpid(), "number": number, "at": time.monotonic(), "found": engine.weight_version}
    response = await handler(request)
    if number <= 3 or number % 10 == 0:
        line |= {"end": time.monotonic(), "left": engine.weight_version}
        with open(os.environ["ELASTIC_WATCH"], "a") as file:
            file.write(json.dumps(line) + "\\n")
    return response
'''


@dataclass
class Disturbed:
    """A run that is disturbed, and what was done to it."""

    workshop: Workshop
    name: str
    draw: random.Random
    done: Counter[str] = field(default_factory=Counter)

    @property
    def folder(self) -> Path:
        return self.workshop.folder / "runs" / self.name

    def start(self, options: list[str]) -> Any:
        os.environ["ELASTIC_WATCH"] = str(self.folder.parent / f"{self.name}.requests")
        command = ["run", "--name", self.name, *(part for each in options for part in ("-s", each))]
        with (self.folder.parent / f"{self.name}.stderr").open("wb") as stderr:
            return self.workshop.start(*command, stdout=subprocess.DEVNULL, stderr=stderr, new_session=True)

    def changes(self) -> tuple[int, int]:
        """Return how many engines have joined or come back, and how many have left or died."""
        log = (self.folder / "log.txt").read_text() if (self.folder / "log.txt").exists() else ""
        joins = re.findall(r"engine \d+ (?:joined|is back) at", log)
        leaves = re.findall(r"engine \d+ at \S+ (?:died|left)", log)
        return len(joins), len(leaves)

    def engines(self) -> list[EngineRow]:
        return [row for row in read_state(self.folder).engines if row.state == "ready"]

    def disturb(self, process: Any, changes: int) -> list[str]:
        """Draw events until there have been so many changes. Return what went wrong."""
        started = time.monotonic()
        while not self.engines() or not (self.folder / "metrics.jsonl").exists():
            if process.poll() is not None or time.monotonic() - started > 300:
                return [f"the run did not start: exit code {process.poll()}"]
            time.sleep(0.2)
        while sum(self.changes()) < changes:
            if process.poll() is not None or time.monotonic() - started > LONGEST_S:
                return [f"the run ended early: exit code {process.poll()}"]
            self._event()
            time.sleep(self.draw.uniform(0.0, 3.0))
        while len(self.engines()) < len(read_state(self.folder).engines):  # all that is under way ends
            time.sleep(0.2)
            if process.poll() is not None or time.monotonic() - started > LONGEST_S:
                return [f"the run ended early: exit code {process.poll()}"]
        time.sleep(2.0)
        return []

    def _event(self) -> None:
        everyone, ready = read_state(self.folder).engines, self.engines()
        name = self.draw.choices([*EVENTS], [*EVENTS.values()])[0]
        if name == "add" and len(everyone) < MOST:
            self._ask("add", "--count", str(self.draw.randint(1, MOST - len(everyone))))
        elif name.startswith("remove") and len(ready) > FEWEST:
            seconds = "0" if name == "remove at once" else "30"
            self._ask("remove", str(self.draw.choice(ready).engine), "--drain", seconds)
        elif name in ("kill", "terminate") and ready:
            pid = server_pid(self.draw.choice(ready).url)
            if pid is None:
                return
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if name == "kill" else signal.SIGTERM)
        else:
            return
        self.done[name] += 1

    def _ask(self, action: str, *arguments: str) -> None:
        """Ask for a change with the command, at times without waiting for it."""
        patience = [] if self.draw.random() < 0.5 else ["--no-wait"]
        where = f"runs/{self.name}"
        self.workshop.start(
            "engines", action, where, *arguments, *patience, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ).wait()


def server_pid(url: str) -> int | None:
    """Return the process of a server by its port."""
    port = url.rpartition(":")[2]
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = process.info["cmdline"] or []
        if port in command and "serve" in command:
            return int(process.info["pid"])
    return None


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]  # texts may have other line separators


def steps(run: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run / "metrics.jsonl") if "train/loss" in line["metrics"]]


def samples(run: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the samples by round."""
    return {int(path.parent.name[5:]): lines(path) for path in sorted(run.glob("step_*/samples.jsonl"))}


def faults(disturbed: Path, whole: Path, level: int) -> Iterator[str]:
    """Compare a disturbed run with an undisturbed one."""
    rounds, expected = samples(disturbed), samples(whole)
    if rounds.keys() != expected.keys():
        yield f"rounds with samples differ: {sorted(rounds.keys() ^ expected.keys())[:10]}"
    counts = {number: len(each) for number, each in rounds.items()}
    if counts != {number: len(each) for number, each in expected.items()}:
        yield "rounds have other sizes"
    ids, expected_ids = (
        Counter((sample["group_index"], sample["index"]) for each in run.values() for sample in each)
        for run in (rounds, expected)
    )
    if doubled := [id for id, count in ids.items() if count > 1]:
        yield f"samples counted twice: {doubled[:5]}"
    if not level and ids != expected_ids:
        yield f"other samples: {sorted(ids.keys() ^ expected_ids.keys())[:5]}"
    sizes = Counter(group for group, _ in ids)
    if torn := [group for group, size in sizes.items() if size != 4]:
        yield f"groups have other sizes: {torn[:5]}"
    # Sampling ahead, groups end in another order, so the last ones may still be in flight when the run ends.
    in_flight = 4 * (level + 2) if level else 0
    if lost := [group for group in range(max(sizes) - in_flight) if group not in sizes]:
        yield f"groups are lost: {lost[:5]}"
    for number, each in rounds.items():
        for sample in each:
            if sample["status"] not in ("completed", "truncated"):
                yield f"round {number}: sample {sample['index']} is {sample['status']}"
            versions = [int(version) for version in sample["weight_versions"]]
            if not versions or min(versions) < number - 1 - level or max(versions) > number - 1:
                yield f"round {number}: sample {sample['index']} has weights {sample['weight_versions']}"
    versions = [(line["step"], line["weight_version"]) for line in steps(disturbed)]
    if versions != [(line["step"], line["weight_version"]) for line in steps(whole)]:
        yield "steps or weight versions differ"
    names, expected_names = ([line["metrics"].keys() for line in steps(run)] for run in (disturbed, whole))
    if not level and names != expected_names:
        yield "metrics of some steps have other names"
    # Some metrics depend on the samples, which depend on the moment when sampling runs ahead.
    always = set.intersection(*map(set, expected_names))
    if missing := sorted({name for step in names for name in always - step}):
        yield f"metrics are missing in some steps: {missing[:5]}"
    perf = [line for line in lines(disturbed / "perf.jsonl") if "perf/engines" in line["metrics"]]
    if len(perf) != len(rounds):
        yield f"perf.jsonl has {len(perf)} of {len(rounds)} rounds"


def stale_first_requests(file: Path) -> tuple[int, list[str]]:
    """Return the number of engines that were asked, and the faults of their first requests."""
    requests = sorted(lines(file), key=lambda line: line["at"])
    newest: defaultdict[int, int] = defaultdict(int)
    wrong = []
    for line in requests:
        found, left = str(line["found"]), str(line["left"])
        if not (found.isdigit() and left.isdigit()):
            wrong.append(f"process {line['pid']}: request {line['number']} found weights {found}, left {left}")
            continue
        if line["number"] == 1:
            before = max((version for pid, version in newest.items() if pid != line["pid"]), default=0)
            # An engine that has a push ahead of it is paused, and answers with the weights of the push.
            if int(left) < before:
                wrong.append(f"process {line['pid']}: first request answered with weights {left} after {before}")
        newest[line["pid"]] = max(newest[line["pid"]], int(found))
    return len({line["pid"] for line in requests}), wrong


def differences(disturbed: Path, whole: Path, level: int) -> str:
    """Describe how far metrics and tokens of two runs differ. If sampling runs ahead, tokens depend on the moment."""
    one, other = steps(disturbed), steps(whole)
    if level:
        means = [sum(line["metrics"]["rollout/raw_reward"] for line in each) / len(each) for each in (one, other)]
        return f"mean reward {means[0]:.4f}, undisturbed {means[1]:.4f}"
    equal = (disturbed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    largest: dict[str, float] = {}
    for a, b in zip(one, other, strict=True):
        for key in a["metrics"].keys() & b["metrics"].keys():
            by = abs(a["metrics"][key] - b["metrics"][key])
            largest[key] = max(largest.get(key, 0.0), by / max(abs(b["metrics"][key]), 1e-6))
    named = sorted((key for key in largest if largest[key]), key=lambda key: -largest[key])
    figures = ", ".join(f"{key} by {largest[key]:.1e}" for key in named[:4]) or "none"
    sampled = max((value for key, value in largest.items() if not any(word in key for word in BY_ENGINE)), default=0.0)
    tokens = [
        {(s["group_index"], s["index"]): s["tokens"] for each in samples(run).values() for s in each}
        for run in (disturbed, whole)
    ]
    both = tokens[0].keys() & tokens[1].keys()
    same = sum(tokens[0][id] == tokens[1][id] for id in both)
    return (
        f"metrics.jsonl {'equal' if equal else 'not equal'} byte for byte, {len(named)} of {len(largest)} metrics "
        f"differ, relatively at most: {figures}; {sampled:.1e} in those that do not depend on which engine served. "
        f"{same} of {len(both)} samples have equal tokens"
    )


def left_behind(folder: Path) -> list[str]:
    time.sleep(3.0)
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            if str(folder) in process.cwd() and "serve" in process.info["cmdline"]:
                found.append(f"process {process.pid} is left")
    return found


def attack(workshop: Workshop, mode: str, seed: int, changes: int, campaign: Campaign) -> None:
    options, level = [*SETTINGS, *MODES[mode]], int(MODES[mode][0][-1])
    label = mode.replace(", ", "-").replace(" ", "-")
    run = Disturbed(workshop, label, random.Random(f"{seed} {mode}"))
    run.folder.parent.mkdir(exist_ok=True)
    started = time.monotonic()
    process = run.start([*options, "run.num_rollout=100000"])
    wrong = run.disturb(process, changes)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.wait()
    duration_s = time.monotonic() - started
    said = (run.folder.parent / f"{label}.stderr").read_text()
    if "Traceback" in said:
        wrong.append("a traceback: " + said[said.index("Traceback") :][:2000])
    joins, leaves = run.changes()
    count = len(samples(run.folder)) if not wrong else 0
    if count:
        undisturbed = Disturbed(workshop, f"{label}-whole", random.Random(0))
        code = undisturbed.start([*options, f"run.num_rollout={count}"]).wait()
        wrong += [f"the undisturbed run ended with {code}"] if code else []
        wrong += faults(run.folder, undisturbed.folder, level)
        engines, stale = stale_first_requests(run.folder.parent / f"{label}.requests")
        wrong += stale
        events = ", ".join(f"{number} {event}" for event, number in run.done.items())
        print(
            f"{mode}: {count} rounds in {duration_s:.0f} s, {joins} joins and {leaves} leaves ({events}), {engines} "
            f"engine processes asked. {differences(run.folder, undisturbed.folder, level)}",
            flush=True,
        )
    wrong += left_behind(workshop.folder)
    campaign.record(mode, f"{joins} joins, {leaves} leaves", survived=not wrong, observation="; ".join(wrong[:10]))
    print(f"{mode}: {'FAILED ' + '; '.join(wrong[:10]) if wrong else 'ok'}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--changes", type=int, default=50, help="Joins and leaves in each mode")
    parser.add_argument("--mode", action="append", default=[], choices=list(MODES), help="Only these modes")
    arguments = parser.parse_args()
    campaign = Campaign("engines that join and leave", seed=arguments.seed)
    with tempfile.TemporaryDirectory(prefix="slimectl elastic ") as name:
        folder = Path(name).resolve()
        (folder / "model").mkdir()
        (folder / "work").mkdir()
        create_model(SHAPE | FAMILIES["llama"], folder / "model", seed=7)
        workshop = set_up(folder / "work", folder / "model")
        (workshop.folder / "watch.py").write_text(WATCH)
        (workshop.folder / "reward.py").write_text(REWARD)
        for mode in arguments.mode or MODES:
            attack(workshop, mode, arguments.seed, arguments.changes, campaign)
        return campaign.finish()


if __name__ == "__main__":
    raise SystemExit(main())
