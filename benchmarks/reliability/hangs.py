"""Runs with a part that hangs: is it named in time, does the run end, and does it go on as if nothing had happened?

    python benchmarks/reliability/hangs.py --seed 1
    python benchmarks/reliability/hangs.py --seed 1 --kind "full pipe" --kind "Ray actor"

Each kind is a run of its own options with `run.stall_timeout`, in which one part hangs while a file `hang` exists. It
has survived if the message names the part, comes within STALL_S and SPARE_S after the hang began, and ends with the
command to continue, if the exit code is 124, no process and no shared memory is left, and the resumed run has the
metrics of a run that never hung.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support" / "cpu"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])

from agents.sessions import CHATML
from campaign import Campaign
from conftest import FAMILIES, SHAPE
from kills import Killer, outcome, shared_memory
from workshop import Workshop, alike, set_up

from slimectl.checkpoints.create import create_model

STALL_S = 8.0
SPARE_S = 15.0
"""How long the message may take beyond the time-out: looks, and asking every process for its stacks."""
END_S = 60.0
"""How long the run may take to end after the message."""

FUNCTIONS = '''
import os, signal, subprocess, sys, threading, time

FOLDER = os.path.dirname(os.path.abspath(__file__))
HANG = os.path.join(FOLDER, "hang")
LOCK = threading.Lock()
LOCK.acquire()


def now(kind):
    """Whether this kind of hang is due in the run, which has two rounds behind it. Announces it."""
    if not os.path.exists(HANG):
        return False
    word, run = open(HANG).read().split()
    if word != kind or not os.path.exists(os.path.join(FOLDER, "runs", run, "step_000002")):
        return False
    with open(HANG + ".began", "a") as file:
        file.write(f"{time.time()}\\n")
    return True


def reward(sample):
    if "held" in sample.prompt:
        if now("evaluation"):
            threading.Event().wait()
    elif now("lock"):
        with LOCK:
            pass
    elif now("pipe"):
        child = subprocess.Popen([sys.executable, "-c", "print('x' * 1000000)"], stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL)
        child.wait()
        child.stdout.read()
    elif now("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif now("actor"):
        time.sleep(1e6)
    elif now("regex"):
        import re
        re.match(r"(a+)+$", "a" * 64 + "b")
    answer = sample.tokens[len(sample.tokens) - sample.response_length:]
    return sum(token < 64 for token in answer) / len(answer)


def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    if now("input"):
        input("Continue? ")
    return False


def loss(args, batch, logits, log_probs, entropy, sum_of_sample_mean):
    rank = int(os.environ.get("RANK", 0))
    if rank == 1 and now("rank"):
        time.sleep(1e6)
    if rank == 1 and now("collective"):
        import torch.distributed as dist
        dist.barrier()
    return sum_of_sample_mean(-batch.advantages_T * log_probs), {}


def spoil(event, arguments):
    """Put a FIFO where a file of a checkpoint is written."""
    if event == "open" and str(arguments[0]).endswith("trainer.json") and arguments[1] == "w" and now("checkpoint"):
        os.mkfifo(arguments[0])


if os.path.exists(HANG) and "checkpoint" in open(HANG).read():
    sys.addaudithook(spoil)
'''
AGENT = """
import json, os, sys, time, urllib.request
sys.path.insert(0, os.getcwd())
from reward import now

task = json.loads(input())
if now("agent"):
    time.sleep(1e6)
body = json.dumps({"messages": task["messages"], "max_tokens": 6}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(sum(letter < "M" for letter in text) / 6)
"""
WORLD = """
import os, sys, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from reward import now
from slimectl.agents.environments.port import Environment, Observation


class World(Environment):
    def __init__(self, target, arguments):
        pass

    def reset(self, task):
        return Observation([{"role": "user", "content": f"Task {task.seed % 8}."}])

    def step(self, action):
        if now("environment"):
            time.sleep(1e6)
        return Observation(rewards={0: sum(letter < "M" for letter in action.text) / 20}, is_done=True)
"""


@dataclass
class Kind:
    """A kind of hang: the word that starts it, the options of its run, and what the message has to say."""

    name: str
    word: str
    says: str
    options: list[str] = field(default_factory=list)
    exact: bool = True
    """Whether two runs of these options have equal metrics to the last bit."""
    code: int = 124


KEY = ["-s", "engine.admin_api_key=env:HANGS_KEY"]
os.environ["HANGS_KEY"] = "key-of-this-campaign"
RANKS = ["-s", "cluster.actor_num_gpus_per_node=2", "-s", "train.custom_loss_function_path=reward.py:loss"]
OWN_REWARD = ["-s", "score.custom_rm_path=none", "-s", "eval.interval=none", "-s", "rollout.max_response_len=60"]
WORLD_EVAL = ["-s", "eval.data={small={path='held.jsonl', rm_type='exact'}}"]
WORKER = ["-s", "score.workers=1"]
TRACKER = ["-s", "track.with=['stdout','jsonl']", "-s", "track.kwargs={jsonl={path='tracked.jsonl'}}"]
INPUT = ["-s", "track.custom_rollout_log_function_path=reward.py:log"]
REWARD = r"reward\.py:\d+ \(reward\)"
KINDS = [
    Kind("rank that sleeps", "rank", r"rank 1 \(process \d+\) is stuck in reward\.py:\d+ \(loss\)", RANKS),
    Kind("reward function in a deadlock", "lock", REWARD + r": `with LOCK:` \(score\.custom_rm_path"),
    Kind("server that never answers", "server", r"the server at http://127\.0\.0\.1:\d+ has not answered", exact=False),
    Kind("collectives that differ", "collective", r"not call the same.* rank 0 is in .* rank 1 is in barrier", RANKS),
    Kind("full pipe", "pipe", REWARD + r".* child process \d+ .* writes into a full pipe", WORKER),
    Kind("stuck tracker", "tracker", r"a tracker is stuck in trackers/jsonl\.py.* full pipe", TRACKER),
    Kind("agent's program", "agent", r"agent's program does not end: .*agent\.py \(process \d+\) sleeps",
         ["--agent", "python agent.py", *OWN_REWARD], exact=False),
    Kind("environment", "environment", r"environment \(forked\) \(process \d+\) is stuck in world\.py:\d+ \(step\)",
         ["--env", "python:world.py:World", "--data", "env@[:8]", *OWN_REWARD, *WORLD_EVAL], exact=False),
    Kind("stopped worker", "stopped", r"worker \(process \d+\) is stopped by a signal", WORKER),
    Kind("Ray actor", "actor", r"sampler \(process \d+\) is stuck in " + REWARD, ["--executor", "ray"]),
    Kind("rank in a Ray actor", "rank", r"rank 1 \(process \d+\) is stuck in reward\.py:\d+ \(loss\)",
         [*RANKS, "--executor", "ray"]),
    Kind("hook that waits for input", "input", r"reward\.py:\d+ \(log\): `input\(.*\(track\.custom_rollout_log", INPUT),
    Kind("evaluation", "evaluation", r"the evaluation is stuck in " + REWARD),
    Kind("checkpoint on a FIFO", "checkpoint", r"checkpoint is stuck in .* FIFO"),
    Kind("regular expression without end", "regex", REWARD, code=-9),  # no thread of the run's process can run
]  # fmt: skip


class SilentProxy:
    """Forwards connections to a server. While the hang is due, it accepts requests for responses and keeps them."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._forward, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, False), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_request and data.startswith(b"POST /generate ") and self._is_due():
                    with (self._folder / "hang.began").open("a") as file:
                        file.write(f"{time.time()}\n")
                    while source.recv(1 << 16):
                        pass
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _is_due(self) -> bool:
        hang = self._folder / "hang"
        if not hang.exists():
            return False
        word, run = hang.read_text().split()
        return word == "server" and (self._folder / "runs" / run / "step_000002").exists()


class Hanger:
    """Runs the kinds in one folder."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self._killer = Killer(workshop, random.Random(0))
        self._undisturbed: dict[tuple[str, ...], dict[str, Any]] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._proxy: SilentProxy | None = None
        self.seconds = self.ending = 0.0
        """Seconds from the hang to the message, and from there to the end of the run."""

    def attack(self, kind: Kind) -> tuple[str, list[str]]:
        """Hang a run, look at its end, and resume it. Return what was seen, and what is wrong."""
        folder, run = self.workshop.folder, f"hang-{KINDS.index(kind)}"
        options = [*kind.options, *(["--engine-url", self._url(), *KEY] if kind.word == "server" else [])]
        expected = self._outcome(tuple(options))
        before = shared_memory()
        tracked = folder / "tracked.jsonl"
        tracked.unlink(missing_ok=True)
        if kind.word == "tracker":
            reader = self._fifo(tracked)
        (folder / "hang.began").unlink(missing_ok=True)
        (folder / "hang").write_text(f"{kind.word} {run}")
        command = ["run", "--name", run, *options, "-s", f"run.stall_timeout={STALL_S}"]
        silent_stdin, writer = os.pipe()
        process = subprocess.Popen(
            self.workshop.command(*command), cwd=folder, env=self.workshop.environment, stdin=silent_stdin,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        lines: list[tuple[float, str]] = []
        assert process.stderr is not None
        for line in process.stderr:
            lines.append((time.time(), line.decode(errors="replace").rstrip()))
        code, ended = process.wait(), time.time()
        os.close(writer)
        os.close(silent_stdin)
        if kind.word == "tracker":
            os.close(reader)
            tracked.unlink()
        (folder / "hang").unlink()
        faults = self._faults(kind, run, code, lines, ended)
        faults += [f"left behind: {left}" for left in self._killer.leftovers(before)]
        resumed = self.workshop.start("run", "--resume", f"runs/{run}", "-s", "run.stall_timeout=60",
                                      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
        _, words = resumed.communicate()
        if resumed.returncode:
            faults.append(f"the resume ended with {resumed.returncode}: {words.decode().splitlines()[-1:]}")
        else:
            faults += differences(expected, outcome(folder / "runs" / run), exact=kind.exact)
        message = next((line for _, line in lines if "no progress for" in line), "no message")
        return message, faults

    def _faults(self, kind: Kind, run: str, code: int, lines: list[tuple[float, str]], ended: float) -> list[str]:
        folder = self.workshop.folder
        found = [(at, line) for at, line in lines if "no progress for" in line]
        if not found:
            return [f"no message (exit code {code}): {[line for _, line in lines[-3:]]}"]
        began = folder / "hang.began"
        records = folder / "runs" / run / "perf.jsonl"
        if not records.exists():
            return [f"it came before the first round: {found[0][1]}"]
        start = float(began.read_text().split()[0]) if began.exists() else records.stat().st_mtime
        at, message = found[0]
        late_s, self.seconds, self.ending = at - start - STALL_S, at - start, ended - at
        faults = [] if code == kind.code else [f"exit code {code}"]
        if not re.search(kind.says, message):
            faults.append(f"the message does not name the part: {message}")
        if late_s > SPARE_S or late_s < -1:
            faults.append(f"the message came {at - start:.1f} s after the hang")
        if ended - at > END_S:
            faults.append(f"the run ended {ended - at:.0f} s after the message")
        if not lines[-1][1].endswith(f"Continue with: slimectl run --resume runs/{run}"):
            faults.append(f"the last line is: {lines[-1][1]}")
        if "Traceback" in " ".join(line for _, line in lines):
            faults.append("a traceback: " + " | ".join(line for _, line in lines)[-1500:])
        return faults

    def _outcome(self, options: tuple[str, ...]) -> dict[str, Any]:
        """Return the outcome of a run that does not hang, once for each set of options."""
        if options not in self._undisturbed:
            run = f"whole-{len(self._undisturbed)}"
            self.workshop.slimectl("run", "--name", run, *options)
            self._undisturbed[options] = outcome(self.workshop.folder / "runs" / run)
        return self._undisturbed[options]

    def _fifo(self, path: Path) -> int:
        """Make a small FIFO, and open it for reading. It is never read."""
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
        return reader

    def _url(self) -> str:
        """Start a server and a proxy in front of it. Return the proxy's address."""
        if self._proxy is None:
            command = self.workshop.command("serve", "--model", str(self.workshop.model), "--port", "0")
            self._server = subprocess.Popen(
                [*command, "--wait-for-weights", *KEY], cwd="/", env=self.workshop.environment, stderr=subprocess.PIPE
            )
            assert self._server.stderr is not None
            for line in self._server.stderr:
                if match := re.search(rb"http://127\.0\.0\.1:(\d+)", line):
                    self._proxy = SilentProxy(self.workshop.folder, int(match[1]))
                    break
            threading.Thread(target=self._server.stderr.read, daemon=True).start()
        assert self._proxy is not None, "the server has not started"
        return self._proxy.url

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()


def differences(expected: dict[str, Any], actual: dict[str, Any], *, exact: bool) -> list[str]:
    """Return what differs: the metrics, the weights, the newest checkpoint, or half-written files."""
    names = ["metrics", "weights", "latest", "half-made", "signed"] if exact else ["latest", "half-made", "signed"]
    wrong = [f"{name} differ" for name in names if expected[name] != actual[name]]
    if not exact:
        one, other = ([json.loads(line) for line in it["metrics"].splitlines()] for it in (expected, actual))
        try:
            alike(one, other)
        except AssertionError as error:
            wrong.append(f"metrics differ: {error}")
    return wrong


def prepare(folder: Path) -> Workshop:
    """Write model, prompts, settings and the functions that hang."""
    (folder / "model").mkdir()
    (folder / "work").mkdir()
    create_model(SHAPE | FAMILIES["llama"], folder / "model", seed=7)
    config = folder / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": CHATML}))
    workshop = set_up(folder / "work", folder / "model")
    for name, text in {"reward.py": FUNCTIONS, "agent.py": AGENT, "world.py": WORLD}.items():
        (workshop.folder / name).write_text(text)
    (workshop.folder / "held.jsonl").write_text('{"prompt": "held out", "label": ""}\n')
    settings = (workshop.folder / "slimectl.toml").read_text().replace("prompts.jsonl@[0:3]", "held.jsonl")
    (workshop.folder / "slimectl.toml").write_text(settings.replace("num_rollout = 6", "num_rollout = 5"))
    return workshop


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="Order of the kinds")
    parser.add_argument("--kind", action="append", default=[], choices=[kind.name for kind in KINDS])
    arguments = parser.parse_args()
    kinds = [kind for kind in KINDS if not arguments.kind or kind.name in arguments.kind]
    random.Random(arguments.seed).shuffle(kinds)
    campaign = Campaign("hangs", seed=arguments.seed)
    with tempfile.TemporaryDirectory(prefix="slimectl-hangs-") as name:
        hanger = Hanger(prepare(Path(name).resolve()))
        try:
            for kind in kinds:
                message, faults = hanger.attack(kind)
                campaign.record(kind.name, kind.word, survived=not faults, observation="; ".join(faults))
                result = "FAILED " + "; ".join(faults) if faults else "ok"
                times = f"after {hanger.seconds:.1f} s, ended {hanger.ending:.1f} s later"
                print(f"{kind.name}: {result}\n    {times}: {message}", file=sys.stderr, flush=True)
        finally:
            hanger.close()
    return campaign.finish()


if __name__ == "__main__":
    raise SystemExit(main())
