"""`slimectl convert` beside `cp` of the same bytes, and its peak memory against the size of the model.

    python benchmarks/convert.py [--sizes 0.3 1 3] [--rounds 3] [--folder DIR]

Models of Qwen3's shape and random bfloat16 weights, differing in their number of layers only, are made in DIR (a
temporary folder if not given; 4 times the largest size is needed). For each direction, Hugging Face to torch_dist and
back, one process does in turns: `cp`, `cp` brought to the disk with `sync` (a conversion always does that), and the
conversion, unverified; the first round is not counted. Every turn begins as the copy of the one before is deleted: a
virtual machine gets memory that it used a moment ago at once, and other memory slowly, whatever asks for it. Printed
are medians: bytes a second by the clock and by CPU seconds (of all threads), ratios of neighbouring turns, and the
process's peak resident memory with how much of it imports had taken before. Hashing every file for the manifest is part
of the conversion.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimectl.data.convert_options import ConvertOptions

os.environ.setdefault("OMP_NUM_THREADS", "1")

SHAPE = {
    "model_type": "qwen3", "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip


class Random:
    """Weights of that many layers: slices of one block of random numbers."""

    def __init__(self, layers: int) -> None:
        import torch

        from slimectl.architectures.config import with_defaults
        from slimectl.architectures.registry import shapes

        self.config = {**SHAPE, "num_hidden_layers": layers}
        self.shapes = shapes(with_defaults(self.config))
        self.dtype = torch.bfloat16
        self.block = torch.randn(2**26, dtype=torch.bfloat16)

    def forms(self) -> dict[str, Any]:
        return {name: (shape, self.dtype) for name, shape in self.shapes.items()}

    def get(self, name: str) -> Any:
        import torch

        count = torch.Size(self.shapes[name]).numel()
        start = hash(name) % (len(self.block) - count)
        return self.block[start : start + count].view(self.shapes[name])


def make(folder: Path, gigabytes: float) -> int:
    """A model of about that size; its bytes."""
    from slimectl.checkpoints.hf import write_hf

    outer, layer = 2 * 32768 * 1024 * 2, 2 * (3 * 1024 * 2048 + 3 * 1024 * 3072)
    weights = Random(max(1, round((gigabytes * 1e9 - outer) / layer)))
    folder.mkdir()
    write_hf(folder, weights)
    (folder / "config.json").write_text(json.dumps(weights.config))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def child(source: Path, target: Path, to: str, rounds: int) -> None:
    """All turns of one direction, with their facts on stdout; the last conversion stays."""
    # What is imported on the way is no part of the work.
    import torch.distributed.checkpoint.filesystem  # noqa: F401

    from slimectl.architectures.config import with_defaults
    from slimectl.checkpoints.conversion import convert_checkpoint

    with_defaults(SHAPE)
    base, copy = peak_bytes(), target.with_name("copy")
    turns = {
        "cp": lambda: copied(source, copy, sync=False),
        "cp and sync": lambda: copied(source, copy, sync=True),
        to: lambda: convert_checkpoint(source, target, ConvertOptions(to=to, verify=False)),
    }
    facts: dict[str, Any] = {name: [] for name in turns}
    for _ in range(rounds + 1):
        for name, turn in turns.items():
            for old in (copy, target):
                shutil.rmtree(old, ignore_errors=True)
            facts[name].append(timed(turn))
    print(json.dumps({"turns": facts, "base": base, "peak": peak_bytes()}))


def timed(turn: Callable[[], Any]) -> dict[str, float]:
    def cpu() -> float:
        found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in found)

    start, before = time.perf_counter(), cpu()
    turn()
    return {"wall": time.perf_counter() - start, "cpu": cpu() - before}


def copied(source: Path, target: Path, *, sync: bool) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    if sync:
        subprocess.run(["sync", *map(str, target.iterdir())], check=True)


def peak_bytes() -> int:
    """Peak resident memory of this program; getrusage's would be its parent's where that was larger."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def measure(folder: Path, gigabytes: float, rounds: int) -> None:
    source, there, back = (folder / name for name in ("source", "there", "back"))
    size = make(source, gigabytes)
    print(f"{size / 1e9:.2f} GB")
    for before, after, to in ((source, there, "torch_dist"), (there, back, "hf")):
        command = [sys.executable, __file__, "--child", str(before), str(after), to, str(rounds)]
        facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for name, runs in facts["turns"].items():
            wall, cpu = (size / statistics.median(run[key] for run in runs[1:]) / 1e9 for key in ("wall", "cpu"))
            print(f"  {'to ' + name if name == to else name:<14} {wall:5.2f} GB/s {cpu:5.2f} GB a CPU-second", end="")
            if name == to:
                for cp in ("cp", "cp and sync"):
                    pairs = list(zip(facts["turns"][cp], runs, strict=True))[1:]
                    wall, cpu = (statistics.median(a[key] / b[key] for a, b in pairs) for key in ("wall", "cpu"))
                    print(f", {wall:.2f} of {cp} ({cpu:.2f} by CPU)", end="")
                print(f", peak {facts['peak'] / 1e6:.0f} MB, imports {facts['base'] / 1e6:.0f} MB", end="")
            print(flush=True)
    for made in (source, there, back):
        shutil.rmtree(made)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.3, 1, 3], help="gigabytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for gigabytes in options.sizes:
            measure(Path(folder), gigabytes, options.rounds)


if __name__ == "__main__":
    main()
