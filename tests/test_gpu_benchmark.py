"""benchmarks/gpu.py on the CPU: complete tables of the card `tiny`, FLOPs by hand, rows of trials that fail."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OPTIONS = (
    "--cards tiny --tokens 128 --length 64 --packs 1 --recompute full --requests 1 8 --prompt 8 --answer 16"
    " --repetitions 2 --device cpu"
)
WORDS = ("card", "part", "recompute", "of peak")
"""Columns without numbers, of a CPU."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def forked(trial: Any) -> Any:
    """The result of a trial in a forked process, by its own entry point."""
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    program = "import gpu_trial; gpu_trial.main()"
    done = forkserver.run_python(program, [json.dumps(asdict(trial))], cwd=Path.cwd(), env=environment)
    return sys.modules["gpu"].result_of(done.returncode, done.stdout)


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every table in Markdown, without the line under its titles."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    return [[line.strip("| ").split(" | ") for line in lines if "---" not in line] for lines in blocks]


@pytest.mark.slow
def test_every_cell_of_the_tables_has_a_number(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(gpu, "run_process", forked)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *OPTIONS.split()])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    out = capsys.readouterr().out
    assert end.value.code == 0, out
    assert re.match(rf"One thread of .+; torch {re.escape(torch.__version__)}\. \d{{4}}-\d\d-\d\d\. `python ", out)
    training, engine, push = tables(out)
    trainers = ["fsdp", "megatron"] if find_spec("megatron") else ["fsdp"]
    for (titles, *rows), parts in ((training, trainers), (engine, ["engine"]), (push, ["push"])):
        assert [row[:2] for row in rows] == [["tiny", part] for part in parts]
        for row in rows:
            cells = dict(zip(titles, row, strict=True))
            numbers = [cell for title, cell in cells.items() if title not in WORDS]
            assert all(float(cell.replace(",", "").removesuffix("%")) > 0 for cell in numbers), row
    step = dict(zip(*training[:2], strict=True))
    assert step["of peak"] == "unknown"  # of a CPU there is no vendor's number
    tokens_per_s = float(step["tokens/s"].replace(",", ""))
    assert tokens_per_s * float(step["step s"]) == pytest.approx(128, rel=0.02)  # both are rounded
    flops_per_token = float(step["TFLOP/s"]) * 1e12 / tokens_per_s
    # Multiplied: 4 layers of 4 x 128 x 128 + 3 x 128 x 384, their norms and the last one, and the tied head; attention:
    # 12 FLOPs for each of 4 layers, 128 columns and half of 64 tokens.
    multiplied = 4 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128) + 128 + 259 * 128
    assert flops_per_token == pytest.approx(6 * multiplied + 12 * 4 * 128 * 32, rel=0.02)


def trial_of(gpu: Any, part: str) -> Any:
    return gpu.Trial("tiny", part, "cpu", 128, 64, 1, "none", "float32", (1,), 8, 16, 1)


def test_a_trial_that_does_not_fit_or_dies_is_a_row_and_the_others_go_on(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def allocate(trial: Any, folder: Path) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB | and more\nof it")

    trials = importlib.import_module("gpu_trial")
    monkeypatch.setitem(trials.MEASURES, "fsdp", allocate)
    results = {"fsdp": trials.measure(trial_of(gpu, "fsdp")), "megatron": gpu.result_of(-9, "")}
    monkeypatch.setattr(gpu, "run_process", lambda trial: results[trial.part])
    (table, *_) = gpu.tables((1,))
    assert gpu.print_table(table, [trial_of(gpu, "fsdp")], None)
    assert not gpu.print_table(table, [trial_of(gpu, "megatron"), trial_of(gpu, "fsdp")], None)
    (titles, row), (_, dead, last) = tables(capsys.readouterr().out)
    assert len(row) == len(titles)
    assert row[3] == "does not fit: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB / and more"
    assert float(row[-1]) > 0  # what the plan foresees
    assert dead[3] == "failed: its process ended with code -9"
    assert last == row


def test_a_trial_that_hangs_is_ended(gpu: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "LIMIT_S", 0.01)
    assert gpu.run_process(trial_of(gpu, "fsdp")) == {"failure": "failed: no result within 0.01 s"}


def test_random_weights_are_the_same_each_time_and_norms_are_one(gpu: Any):
    first, second = (
        importlib.import_module("gpu_trial").RandomWeights(trial_of(gpu, "engine").config, "cpu") for _ in range(2)
    )
    for (name, tensor), (again, same) in zip(first.read(Path()), second.read(Path()), strict=True):
        assert name == again
        assert torch.equal(tensor, same)
        assert tensor.dtype == torch.bfloat16
        assert bool((tensor == 1).all()) == name.endswith("norm.weight")
