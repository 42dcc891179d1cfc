"""Hostile requests and clients against a real `slimectl serve` process on 127.0.0.1.

    python benchmarks/reliability/serve_requests.py --seed 1 [--count 160] [--descriptors 160]

The model is a small random one in a temporary folder, the process may open few descriptors. An attack is survived if
its answer has a documented status and says one line (or the connection ends, where there is nobody to answer), and the
server answers /health and /generate afterwards. At the end nothing may have grown: descriptors, memory, stderr.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from campaign import Campaign
from serve_attacks import ATTACKS, strange_bodies
from serve_target import ADMIN_KEY, GRACE_S, Target

os.environ.setdefault("OMP_NUM_THREADS", "1")


@contextmanager
def served(folder: Path, descriptors: int) -> Iterator[Target]:
    from slimectl.checkpoints.create import create_model

    shape = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }  # fmt: skip
    create_model(shape, folder / "model", seed=7)
    command = [sys.executable, "-m", "slimectl", "serve", "--model", str(folder / "model"), "--port", "0"]
    errors = folder / "stderr"
    with errors.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--pause-timeout", "1"],
            stderr=log,
            env=os.environ | {"SLIMECTL_ENGINE_ADMIN_API_KEY": ADMIN_KEY},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors)),
        )
    try:
        while not (line := errors.read_text()).endswith("\n"):
            if process.poll() is not None:
                raise SystemExit(f"the server did not start: {line}")
            time.sleep(0.1)
        yield Target(process, int(line.split(": ")[0].rsplit(":", 1)[1]), errors)
    finally:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--descriptors", type=int, default=160, help="descriptors that the server may open")
    options = parser.parse_args()
    draw, campaign = random.Random(options.seed), Campaign("serve requests", options.seed)
    weights = [share for share, _ in ATTACKS.values()]
    names = draw.choices(list(ATTACKS), weights, k=max(0, options.count - len(ATTACKS)))
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), options.descriptors) as target:
        if trouble := target.answers():
            raise SystemExit(trouble)
        strange_bodies(target, random.Random(0))  # what it needs once for large bodies
        before = target.descriptors(), target.memory_mib()
        for number, name in enumerate(sorted([*ATTACKS, *names], key=list(ATTACKS).index)):
            attack, (survived, observation) = "?", (False, "")
            try:
                attack, (survived, observation) = ATTACKS[name][1](target, draw)
            except OSError as error:
                observation = f"{type(error).__name__}: {error}"
            trouble = "" if survived and number % 5 else target.answers()
            campaign.record(name, attack, survived=survived and not trouble, observation=trouble or observation)
        _record_growth(campaign, target, before)
    return campaign.finish()


def _record_growth(campaign: Campaign, target: Target, before: tuple[int, float]) -> None:
    deadline = time.monotonic() + GRACE_S
    while target.descriptors() > before[0] + 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    grown = target.descriptors() - before[0]
    campaign.record("no growth", "descriptors", survived=grown <= 2, observation=f"{grown} more")
    mib = target.memory_mib() - before[1]
    campaign.record("no growth", "memory", survived=mib < 256, observation=f"{mib:.0f} MiB more")
    size = target.errors.stat().st_size
    campaign.record("no growth", "stderr", survived=size < 4096, observation=f"{size} bytes")
    print(f"descriptors +{grown}, memory +{mib:.0f} MiB, stderr {size} bytes:\n{target.errors.read_text()[:2000]}")


if __name__ == "__main__":
    raise SystemExit(main())
