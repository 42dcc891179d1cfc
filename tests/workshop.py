"""A small real run: two-layer model, eight prompts, a reward with some variance, driven by the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forkserver
import pytest
from forkserver import Process

REWARD = '''
def reward(sample):
    """The share of small bytes in the answer: an untrained model has some, and can learn to write more."""
    answer = sample.tokens[len(sample.tokens) - sample.response_length:]
    return sum(token < 64 for token in answer) / len(answer)
'''


@dataclass
class Workshop:
    """A folder with prompts, a reward, settings and a model; commands run in it."""

    folder: Path
    model: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "slimectl", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1"}

    stderr: str = ""
    """Words of the last command."""

    def start(self, *arguments: str, **streams: Any) -> Process:
        """Start a command in a forked process; `streams` mean what they mean to subprocess.Popen."""
        return forkserver.start(list(arguments), cwd=self.folder, env=self.environment, **streams)

    def slimectl(self, *arguments: str, stdin: bytes | None = None, code: int = 0, timeout_s: float = 300) -> bytes:
        """Run a command to its end and return its stdout. Fails with its stderr if the exit code is not `code`."""
        pipe = subprocess.PIPE
        process = self.start(*arguments, stdin=None if stdin is None else pipe, stdout=pipe, stderr=pipe)
        try:
            stdout, stderr = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        self.stderr = stderr.decode()
        assert process.returncode == code, self.stderr
        return stdout

    def metrics(self, run: str) -> list[dict]:
        lines = (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


SETTINGS = """
[model]
path = "{model}"
[rollout]
data = ["prompts.jsonl"]
n_samples_per_prompt = 4
max_response_len = 12
apply_chat_template = false
[score]
custom_rm_path = "reward.py:reward"
[train]
lr = 1e-3
lr_decay_style = "linear"
[eval]
data = {{ small = "prompts.jsonl@[0:3]" }}
interval = 2
[run]
name = "a"
num_rollout = 6
rollout_batch_size = 4
save_interval = 1
keep_checkpoints = "none"
keep_samples = true
[track]
plot = false
"""


def set_up(folder: Path, model: Path) -> Workshop:
    """A workshop in an empty folder."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    prompts = [{"prompt": f"say {word}", "label": word} for word in words]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    (folder / "reward.py").write_text(REWARD)
    (folder / "slimectl.toml").write_text(SETTINGS.format(model=model))
    return Workshop(folder, model)


def killed(workshop: Workshop, arguments: list[str], metrics: Path, at_bytes: int) -> bool:
    """Start a run and kill -9 it once its metrics have grown to `at_bytes`; False if it ended first."""
    process = workshop.start(*arguments, stderr=subprocess.DEVNULL)
    started = metrics.parent / "run.toml"
    while process.poll() is None:
        size = metrics.stat().st_size if metrics.exists() else (0 if started.exists() else -1)
        if size >= at_bytes:
            process.kill()
            process.wait()
            return True
        time.sleep(0.002)
    return False


BY_ENGINE = ("prefix_cache_hit_rate", "train_rollout_", "tis", "rollout_log_probs", "train/loss", "train/pg_loss")
"""Metrics that depend on which engine served, or are rounding alone."""


def alike(one: list[dict], other: list[dict]) -> None:
    """The same steps from the same answers, whichever engine wrote them."""
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for a, b in zip(one, other, strict=True):
        for name, value in a["metrics"].items():
            if not any(word in name for word in BY_ENGINE):
                assert b["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (a["step"], name)
