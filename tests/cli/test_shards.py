"""Rollouts of parts of a file, joined by names or by a pipe, are the rollout of the whole file."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from workshop import Workshop, set_up

PROMPTS = 8
CUTS = {1: [0, 8], 2: [0, 3, 8], 5: [0, 1, 2, 5, 6, 8]}
"""Where the prompts are cut, by the number of shards."""


@pytest.fixture(scope="module")
def whole(shared_workshop: Workshop) -> bytes:
    return rollout(shared_workshop, "prompts.jsonl")


@pytest.fixture(scope="module")
def whole_norm(shared_workshop: Workshop, whole: bytes) -> float:
    return gradient_norm(shared_workshop, "-", stdin=whole)


@pytest.fixture(scope="module")
def shared_workshop(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path]) -> Workshop:
    return set_up(tmp_path_factory.mktemp("shards"), model_dir("llama"))


def rollout(workshop: Workshop, data: str) -> bytes:
    return workshop.slimectl("rollout", "-c", "slimectl.toml", "--data", data)


def gradient_norm(workshop: Workshop, *files: str, stdin: bytes | None = None) -> float:
    """Return the norm of the gradient of one step on the samples, graded by reward.py."""
    scored = workshop.slimectl("score", *files, "-c", "slimectl.toml", stdin=stdin)
    (report,) = workshop.slimectl(
        "train", "-", "-c", "slimectl.toml", "-s", "run.rollout_batch_size=8", stdin=scored
    ).splitlines()
    return float(json.loads(report)["metrics"]["train/grad_norm"])


@pytest.mark.parametrize("shards", CUTS)
def test_slices_of_a_file_give_the_samples_and_the_gradient_of_the_file(
    shared_workshop: Workshop, whole: bytes, whole_norm: float, shards: int
):
    parts = b"".join(rollout(shared_workshop, f"prompts.jsonl@[{a}:{b}]") for a, b in pairwise(CUTS[shards]))
    assert_same(parts, whole)
    assert gradient_norm(shared_workshop, "-", stdin=parts) == pytest.approx(whole_norm, rel=1e-4)


def assert_same(one: bytes, other: bytes) -> None:
    """Assert that records have the same numbers and tokens; log-probabilities may differ by rounding."""
    records = [[json.loads(line) for line in lines.splitlines()] for lines in (one, other)]
    names = ("group_index", "index", "prompt", "tokens", "label")
    assert [[row[name] for name in names] for row in records[0]] == [
        [row[name] for name in names] for row in records[1]
    ]
    for row, same in zip(*records, strict=True):
        assert row["rollout_log_probs"] == pytest.approx(same["rollout_log_probs"], abs=1e-4)


def test_split_files_give_one_gradient_by_names_and_by_pipe(shared_workshop: Workshop):
    """Files that `split` cut know nothing of each other, so each rollout starts at group 0."""
    folder = shared_workshop.folder
    lines = (folder / "prompts.jsonl").read_bytes().splitlines(keepends=True)
    parts, records = [], []
    for i, (a, b) in enumerate(pairwise(CUTS[5])):
        (folder / f"p{i}.jsonl").write_bytes(b"".join(lines[a:b]))
        parts.append(rollout(shared_workshop, f"p{i}.jsonl"))
        (folder / f"s{i}.jsonl").write_bytes(parts[-1])
        assert json.loads(parts[-1].splitlines()[0])["group_index"] == 0
        rows = [json.loads(line) for line in parts[-1].splitlines()]
        records += [row | {"group_index": row["group_index"] + a, "index": row["index"] + 4 * a} for row in rows]
    by_hand = "".join(json.dumps(record) + "\n" for record in records).encode()
    expected = gradient_norm(shared_workshop, "-", stdin=by_hand)
    assert gradient_norm(shared_workshop, *(f"s{i}.jsonl" for i in range(5))) == expected
    assert gradient_norm(shared_workshop, "-", stdin=b"".join(parts)) == expected
    assert gradient_norm(shared_workshop, "s0.jsonl", "-", stdin=gzip.compress(b"".join(parts[1:]))) == expected
    # One group of all 32 samples, as without numbering, has another gradient.
    merged = "".join(json.dumps(row | {"group_index": 0, "prompt": ""}) + "\n" for row in records).encode()
    assert gradient_norm(shared_workshop, "-", stdin=merged) != pytest.approx(expected, rel=1e-3)


def test_a_slice_of_samples_is_graded(shared_workshop: Workshop, whole: bytes):
    (shared_workshop.folder / "whole.jsonl").write_bytes(whole)
    out = shared_workshop.slimectl("score", "whole.jsonl@[4:12]", "-c", "slimectl.toml", "-o", "part.jsonl")
    assert out == b""
    rows = [json.loads(line) for line in (shared_workshop.folder / "part.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(4, 12))
    shared_workshop.slimectl("score", "whole.jsonl@[4:12]", "-c", "slimectl.toml", "-o", "part.jsonl")
    assert "is up to date with these inputs and settings" in shared_workshop.stderr


def test_stdin_is_read_once(shared_workshop: Workshop):
    shared_workshop.slimectl("score", "-", "-", "--rm-type", "exact", code=2)
    assert shared_workshop.stderr == "slimectl: SAMPLES: - is given twice, but stdin can only be read once\n"


def test_a_bad_line_of_a_second_file_and_a_missing_file_are_named_once(shared_workshop: Workshop, whole: bytes):
    (shared_workshop.folder / "whole.jsonl").write_bytes(whole)
    (shared_workshop.folder / "bad.jsonl").write_text('{"prompt": ')
    shared_workshop.slimectl("score", "whole.jsonl", "bad.jsonl", "--rm-type", "exact", code=3)
    assert shared_workshop.stderr == "slimectl: bad.jsonl:1: not JSON: Expecting value at column 12\n"
    assert shared_workshop.slimectl("score", "whole.jsonl", "no.jsonl", "--rm-type", "exact", code=2) == b""
    assert shared_workshop.stderr == "slimectl: no.jsonl: no such file\n"


def test_parquet_on_stdin_is_named(shared_workshop: Workshop):
    shared_workshop.slimectl("score", "-", "--rm-type", "exact", stdin=b"PAR1" + bytes(64), code=3)
    assert shared_workshop.stderr.startswith("slimectl: <stdin>: this is a Parquet file.")


def test_training_in_a_folder_reads_several_files(shared_workshop: Workshop, whole: bytes):
    folder = shared_workshop.folder
    scored = shared_workshop.slimectl("score", "-", "-c", "slimectl.toml", stdin=whole).splitlines(keepends=True)
    (folder / "one.jsonl").write_bytes(b"".join(scored[:16]))
    (folder / "two.jsonl").write_bytes(b"".join(scored[16:]))
    changes = ["-s", "eval.data={}", "-s", "run.num_rollout=none"]
    shared_workshop.slimectl("train", "one.jsonl", "two.jsonl", "-c", "slimectl.toml", "--name", "both", *changes)
    assert shared_workshop.stderr.count("group numbers restart") == 0  # the numbers of the whole file
    steps = [line["step"] for line in shared_workshop.metrics("both") if "train/step" in line["metrics"]]
    assert steps == [1, 2]  # 32 samples, 16 a round
    (folder / "two.jsonl").write_bytes(b"".join(scored[20:]))
    shared_workshop.slimectl("train", "--resume", "runs/both", "-s", "run.num_epoch=2", code=2)
    assert "two.jsonl" in shared_workshop.stderr


def test_a_restart_of_the_numbers_is_said_once_for_all_epochs(shared_workshop: Workshop, whole: bytes):
    scored = shared_workshop.slimectl("score", "-", "-c", "slimectl.toml", stdin=whole)
    (shared_workshop.folder / "scored.jsonl").write_bytes(scored)
    changes = ["-s", "eval.data={}", "-s", "run.num_rollout=none", "-s", "run.num_epoch=2"]
    files = ["scored.jsonl", "scored.jsonl"]
    shared_workshop.slimectl("train", *files, "-c", "slimectl.toml", "--name", "twice", *changes)
    assert shared_workshop.stderr.count("group numbers restart") == 1


def test_samples_and_demonstrations_together_are_refused(shared_workshop: Workshop, whole: bytes):
    (shared_workshop.folder / "whole.jsonl").write_bytes(whole)
    command = ["train", "whole.jsonl", "prompts.jsonl", "--algorithm", "sft", "-c", "slimectl.toml"]
    shared_workshop.slimectl(*command, code=3)
    assert "prompts.jsonl: has rows without tokens, but whole.jsonl has samples" in shared_workshop.stderr


def test_split_and_xargs(shared_workshop: Workshop, whole: bytes):
    """The line that users write: the shell hands every shard to a command of its own as it stands."""
    command = 'printf "%s\\n" rollout -c slimectl.toml --data prompts.jsonl@[$1:$(($1+4))] END'
    line = f"seq 0 4 4 | xargs -I{{}} sh -c '{command}' _ {{}}"
    words = subprocess.run(["bash", "-c", line], cwd=shared_workshop.folder, capture_output=True, text=True, check=True)
    commands = [each.split() for each in words.stdout.split("END\n")[:-1]]
    assert [each[-1] for each in commands] == ["prompts.jsonl@[0:4]", "prompts.jsonl@[4:8]"]
    assert_same(b"".join(shared_workshop.slimectl(*each) for each in commands), whole)
