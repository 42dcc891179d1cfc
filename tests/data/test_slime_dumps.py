"""Rollout dumps of slime's: their samples are read, and nothing that is pickled in them runs."""

from __future__ import annotations

import enum
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from workshop import Workshop

from slimectl.data.jsonl import read_samples
from slimectl.errors import RecordError
from slimectl.migrate.slime_dumps import slime_samples
from slimectl.migrate.torch_file import Reader, plain
from slimectl.types import Status


class Ending(enum.Enum):
    TRUNCATED = "truncated"


class Hostile:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def sample(**facts: Any) -> dict[str, Any]:
    """A sample as slime's Sample.to_dict writes it."""
    return {
        "group_index": 4, "index": 9, "prompt": [{"role": "user", "content": "1 + 1"}], "tokens": [5, 6, 7],
        "response": "2", "response_length": 2, "label": "2", "reward": {"score": 1.0}, "loss_mask": [1, 0],
        "rollout_log_probs": [-0.5, 0.0], "status": "completed", "weight_versions": ["3"], "metadata": {},
        "remove_sample": False, "teacher_log_probs": None, "non_generation_time": 0.5, "session_id": "s",
        "spec_info": {"spec_verify_ct": 1, "completion_token_num": 2},
        "rollout_routed_experts": np.zeros((2, 2, 2), dtype=np.int32),
    } | facts  # fmt: skip


def dumped(path: Path, *samples: dict[str, Any]) -> Path:
    torch.save({"rollout_id": 3, "samples": list(samples)}, path)
    return path


def test_a_dump_becomes_samples_and_what_is_pickled_in_it_does_not_run(workshop: Workshop):
    touched = workshop.folder / "touched"
    tensors = {
        "rollout_log_probs": torch.tensor([-0.5, -0.25], dtype=torch.bfloat16),
        "metadata": {"turned": torch.arange(6).reshape(2, 3).t(), "np": np.float32(2.5), "array": np.eye(2)},
    }
    dumped(workshop.folder / "3.pt", sample(), sample(status=Ending.TRUNCATED, note=Hostile(touched), **tensors))
    workshop.slimectl("convert", "3.pt", "samples.jsonl", code=2)
    assert "reading a pickle can run code. Add --unpickle" in workshop.stderr
    workshop.slimectl("convert", "3.pt", "samples.jsonl", "--unpickle")
    assert workshop.stderr.strip() == "samples.jsonl: 2 samples"
    workshop.slimectl("convert", "3.pt", "samples.jsonl", "--unpickle", code=2)
    assert "samples.jsonl: already exists. Add --force" in workshop.stderr
    workshop.slimectl("convert", "3.pt", "samples.jsonl", "--unpickle", "--force")
    first, second = read_samples(workshop.folder / "samples.jsonl")
    assert not touched.exists()
    assert (first.group_index, first.index, first.tokens, first.loss_mask) == (4, 9, [5, 6, 7], [1, 0])
    assert (first.reward, first.rollout_log_probs, first.extra["session_id"]) == ({"score": 1.0}, [-0.5, 0.0], "s")
    assert first.rollout_routed_experts is None
    assert second.status is Status.TRUNCATED
    assert second.rollout_log_probs == [-0.5, -0.25]
    assert second.metadata == {"turned": [[0, 3], [1, 4], [2, 5]], "np": 2.5, "array": [[1.0, 0.0], [0.0, 1.0]]}


def test_other_stages_name_the_command_that_reads_a_dump(tmp_path: Path):
    with pytest.raises(RecordError, match=r"slimectl convert .*3\.pt samples\.jsonl --unpickle"):
        next(read_samples(dumped(tmp_path / "3.pt", sample())))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"no archive", "BadZipFile"), ({"weight": torch.zeros(2)}, "the file has no list of samples")],
    ids=["no archive", "weights"],
)
def test_what_is_no_dump_is_refused_in_a_line(tmp_path: Path, content: Any, reason: str):
    path = tmp_path / "model.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    refusal = f"model.pt: not a slime rollout dump that can be read here: .*{reason}"
    with pytest.raises(RecordError, match=refusal) as error:
        list(slime_samples(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([1, 2], "a list"), (None, "null"), ("text", "'text'"), ((1, (2, None)), "a list"), (torch.zeros(2), "a list"),
        (7, "7"), (Ending.TRUNCATED, "'truncated'"), (b"bytes", "null"),
    ],
)  # fmt: skip
def test_an_entry_that_is_no_sample_is_refused_in_a_line(tmp_path: Path, entry: Any, words: str):
    path = dumped(tmp_path / "3.pt", sample(), entry)
    samples = slime_samples(path)
    assert next(samples).index == 9
    with pytest.raises(RecordError) as error:
        next(samples)
    way_out = "Use a dump of --save-debug-rollout-data"
    assert str(error.value) == f"{path}: sample 1: expected an object, got {words}. {way_out}"


def test_classes_are_inert_whatever_they_are_called(tmp_path: Path):
    """In this process, without the sandbox, which is the second wall."""
    content = io.BytesIO()
    torch.save([Hostile(tmp_path / "touched"), torch.nn.Linear(1, 1), {1, 2}, np.arange(2, dtype=">i4")], content)
    archive = zipfile.ZipFile(content)
    shell, module, numbers, array = Reader(archive, archive.namelist()[0].partition("/")[0]).load()
    assert plain(shell) == f"touch {tmp_path / 'touched'}"
    assert not (tmp_path / "touched").exists()
    assert type(module).__name__ == "Linear"
    assert not isinstance(module, torch.nn.Module)
    assert (plain(numbers), plain(array)) == ([1, 2], [0, 1])
