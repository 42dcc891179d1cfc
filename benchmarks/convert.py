"""`slimectl convert` beside `cp` of the same bytes, and its peak memory against the size of the model.

    python benchmarks/convert.py [--sizes 0.3 1 3] [--rounds 3] [--folder DIR]

Models of Qwen3's shape and random bfloat16 weights, differing in their number of layers only, are made in DIR (a
temporary folder if not given; 4 times the largest size is needed). In every round `cp`, Hugging Face to torch_dist and
torch_dist back to Hugging Face take turns, each in a process of its own, unverified; files are in the page cache, and
`cp` is timed without and with bringing its copy to the disk, which a conversion always does. Printed are medians:
bytes a second by the clock and by CPU seconds (of all threads), their ratios to `cp`, and the process's peak resident
memory with how much of it imports had taken before. Hashing every file for the manifest is part of the conversion.
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
from pathlib import Path
from typing import Any

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

        from slimectl.weights.complete import completed
        from slimectl.weights.counts import shapes

        self.config = {**SHAPE, "num_hidden_layers": layers}
        self.shapes = shapes(completed(self.config))
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


def child(source: Path, target: Path, to: str) -> None:
    """One conversion, with its facts on stdout."""
    # What is imported on the way is no part of the work.
    import torch.distributed.checkpoint.filesystem  # noqa: F401

    from slimectl.conversions import convert_checkpoint
    from slimectl.weights.complete import completed

    completed(SHAPE)
    base = peak_bytes()
    start, cpu = time.perf_counter(), time.process_time()
    convert_checkpoint(source, target, to=to, verify=False)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(json.dumps({"wall": wall, "cpu": cpu, "peak": peak_bytes(), "base": base}))


def peak_bytes() -> int:
    """Peak resident memory of this program; getrusage's would be its parent's where that was larger."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def converted(source: Path, target: Path, to: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", str(source), str(target), to]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def copied(source: Path, target: Path, *, sync: bool) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    if sync:
        subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall": wall, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measure(folder: Path, gigabytes: float, rounds: int) -> None:
    source, there, back, copy = (folder / name for name in ("source", "there", "back", "copy"))
    size = make(source, gigabytes)
    facts: dict[str, list[dict[str, float]]] = {}
    for round_ in range(rounds + 1):
        turns = {
            "cp": lambda: copied(source, copy, sync=False),
            "cp and sync": lambda: copied(source, copy, sync=True),
            "hf to torch_dist": lambda: converted(source, there, "torch_dist"),
            "torch_dist to hf": lambda: converted(there, back, "hf"),
        }
        for name, turn in turns.items():
            found = turn()
            if round_:  # the first is to warm up: memory that a virtual machine never touched is slow to get
                facts.setdefault(name, []).append(found)
            shutil.rmtree(copy, ignore_errors=True)
        for made in (there, back):
            shutil.rmtree(made)
    shutil.rmtree(source)
    print(f"{size / 1e9:.2f} GB")
    for name, runs in facts.items():
        wall, cpu = (size / statistics.median(run[key] for run in runs) / 1e9 for key in ("wall", "cpu"))
        line = f"  {name:<17} {wall:5.2f} GB/s  {cpu:5.2f} GB a CPU-second"
        if "peak" in runs[0]:
            ratios = [
                statistics.median(other[key] / run[key] for run, other in zip(runs, facts[cp], strict=True))
                for cp in ("cp", "cp and sync")
                for key in ("wall", "cpu")
            ]
            line += "  of cp {:.2f} ({:.2f} CPU), of cp and sync {:.2f} ({:.2f} CPU)".format(*ratios)
            peak, base = (max(run[key] for run in runs) / 1e6 for key in ("peak", "base"))
            line += f"  peak {peak:.0f} MB, of it imports {base:.0f} MB"
        print(line, flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
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
