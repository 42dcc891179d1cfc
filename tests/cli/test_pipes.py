"""What can be read once only is input like any other: `<(…)`, FIFOs, /dev/stdin; a second pass reads a copy."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from workshop import Workshop

from slimectl.data.io import byte_lines, is_pipe, spool
from slimectl.data.prompts import open_prompts
from slimectl.errors import RecordError

pytestmark = pytest.mark.slow

SAMPLE = {"group_index": 0, "index": 0, "prompt": "x", "tokens": [1, 2], "response": "b", "response_length": 1,
          "label": "b", "status": "completed"}  # fmt: skip


def bash(workshop: Workshop, line: str, *, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which SLIMECTL is the program."""
    result = subprocess.run(
        ["bash", "-c", line.replace("SLIMECTL", shlex.join(workshop.command()))],
        cwd=workshop.folder, env=workshop.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result


@pytest.fixture
def samples(workshop: Workshop) -> Workshop:
    lines = [json.dumps({**SAMPLE, "index": i, "group_index": i}) for i in range(3)]
    (workshop.folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return workshop


@pytest.mark.parametrize(
    "source", ["<(cat samples.jsonl)", "/dev/stdin < samples.jsonl", "/dev/stdin < <(cat samples.jsonl)"]
)
def test_samples_come_through_a_pipe(samples: Workshop, source: str):
    result = bash(samples, f"SLIMECTL score {source} --rm-type exact")
    assert [json.loads(line)["reward"] for line in result.stdout.splitlines()] == [1.0] * 3


def test_a_pipe_is_in_the_manifest_as_one_and_is_never_taken_for_the_same_again(samples: Workshop):
    for count in (3, 2):
        bash(samples, f"SLIMECTL score <(head -{count} samples.jsonl) --rm-type exact --out scored.jsonl")
        assert len((samples.folder / "scored.jsonl").read_text().splitlines()) == count
    (value,) = json.loads((samples.folder / "scored.jsonl.manifest.json").read_text())["inputs"].values()
    assert value == "a pipe, read once"


@pytest.mark.parametrize("out", ["/dev/stdout", "/dev/fd/1", ">(cat)"])
def test_an_output_may_be_a_pipe_or_another_name_of_stdout(samples: Workshop, out: str):
    result = bash(samples, f"SLIMECTL score samples.jsonl --rm-type exact --out {out} | cat")
    assert len(result.stdout.splitlines()) == 3


def fifo(path: Path, content: bytes) -> str:
    """A FIFO into which a child writes."""
    os.mkfifo(path)
    if not os.fork():
        path.write_bytes(content)
        os._exit(0)
    return str(path)


def test_prompts_of_several_pipes_are_shuffled_over_several_epochs(workshop: Workshop):
    lines = (workshop.folder / "prompts.jsonl").read_bytes().splitlines(keepends=True)
    first, second = (
        fifo(workshop.folder / name, b"".join(part)) for name, part in (("a", lines[:2]), ("b", lines[-1:]))
    )
    settings = ["rollout.max_response_len=2", "run.num_epoch=2", "rollout.shuffle=true"]
    options = ["--model", str(workshop.model), "-n", "1", *(word for each in settings for word in ("-s", each))]
    out = workshop.slimectl("rollout", *options, "--data", first, "--data", second)
    labels = [json.loads(line)["label"] for line in out.splitlines()]
    assert sorted(labels) == ["eight", "eight", "one", "one", "two", "two"]


def test_demonstrations_are_recognised_in_a_pipe(workshop: Workshop):
    source = fifo(workshop.folder / "pipe", (workshop.folder / "prompts.jsonl").read_bytes())
    options = ["--algorithm", "sft", "--model", str(workshop.model), "-s", "train.global_batch_size=8"]
    assert len(workshop.slimectl("train", source, *options).splitlines()) == 1


def test_a_run_says_which_pipe_it_would_read_again(workshop: Workshop):
    os.mkfifo(workshop.folder / "pipe")
    workshop.slimectl("run", "-s", "eval.data.a=pipe", code=2)
    assert workshop.stderr.endswith(
        ": is a pipe, but evaluations and the warm-up read it again. Write it to a file first.\n"
    )
    assert not (workshop.folder / "runs").exists()


def test_a_fifo_that_is_spooled_is_read_as_often_as_asked(tmp_path: Path):
    path = fifo(tmp_path / "p.jsonl", b'{"a": 1}\n{"a": 2}\n')
    assert is_pipe(path)
    spool(path)
    for _ in range(2):
        assert [line for _, line in byte_lines(path)] == [b'{"a": 1}\n', b'{"a": 2}\n']


def test_a_fifo_may_hold_a_json_array_or_parquet(tmp_path: Path):
    path = fifo(tmp_path / "p.json", b'[{"prompt": "a"}, {"prompt": "b"}]')
    assert [prompt.text for prompt in open_prompts([path])] == ["a", "b"]
    with pytest.raises(RecordError, match=r"q.parquet: cannot be read as Parquet"):
        list(open_prompts([fifo(tmp_path / "q.parquet", b"no parquet")]))
