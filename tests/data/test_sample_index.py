"""An index of a samples file equals a reading of the whole file, grows with it, and is stored for large ones."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest

from slimectl.data import sample_index
from slimectl.data.sample_index import STATUSES, SampleIndex, TrainedSampleIndex, prompt_hash


def record(index: int, **values: object) -> dict:
    return {
        "group_index": index // 4, "index": index, "prompt": f"prompt {index // 4}", "tokens": [1, 2, 3, 4],
        "response": f"answer {index}", "response_length": 3, "reward": index / 10, "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-1.0, 0.0, -2.0], "status": "completed", "weight_versions": ["5", "7"], **values,
    }  # fmt: skip


def write(path: Path, records: list[dict], mode: str = "w") -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in records)


def test_columns_are_the_values_of_the_lines(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    write(
        path,
        [
            record(0, old_log_probs=[-1.5, -9.0, -2.25], advantages=[0.5, 7.0, 1.5]),
            record(1, reward={"name": "x", "score": 0.25}, rollout_id=9, status="truncated"),
            record(2, reward=None, weight_versions=["abc"]),
            {"prompt": [{"role": "user", "content": "hi"}]},
        ],
    )
    index = SampleIndex(path)
    assert index.extend()
    columns = index.columns()
    assert columns["group"].tolist() == [0, 0, 0, 0]
    assert columns["trajectory"].tolist() == [0, 9, 2, 3]
    assert columns["mismatch"][0] == pytest.approx((0.5 + 0.25) / 2)  # where the mask is 1
    assert columns["advantage"][0] == 1.0
    np.testing.assert_equal(columns["reward"], [0.0, 0.25, math.nan, math.nan])
    np.testing.assert_equal(columns["version"], [5.0, 5.0, math.nan, math.nan])
    assert [STATUSES[number] for number in columns["status"]] == ["completed", "truncated", "completed", "pending"]
    assert columns["prompt"][0] == prompt_hash("prompt 0") < 2**53
    assert columns["prompt"][3] == prompt_hash([{"content": "hi", "role": "user"}])
    assert index.record(2)["response"] == "answer 2"


def test_it_grows_with_the_file_and_takes_no_half_line(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    write(path, [record(0)])
    index = SampleIndex(path)
    index.extend()
    with path.open("a") as file:
        file.write(json.dumps(record(1))[:40])
        file.flush()
        index.extend()
        assert len(index) == 1
        assert index.complete
        file.write(json.dumps(record(1))[40:])  # whole, though without its newline yet
        file.flush()
        index.extend()
        assert len(index) == 2
        file.write("\n")
    write(path, [record(2)], "a")
    assert not index.complete
    index.extend()
    assert [line["index"] for line in index.records([0, 1, 2])] == [0, 1, 2]


def test_lines_that_are_no_samples_are_counted_and_the_first_are_named(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    bad = [
        "[1]",
        "{",
        '{"index": "x"}',
        '{"status": "unknown"}',
        '{"index": 1e400}',
        '{"group_index": 123456789012345678901234567890}',
        '{"loss_mask": 3, "advantages": [1]}',
    ]
    path.write_text(json.dumps(record(0)) + "\n" + "\n".join(bad) + "\n\n" + json.dumps(record(1)) + "\n")
    index = SampleIndex(path)
    index.extend()
    assert (len(index), index.bad_lines, len(index.errors)) == (2, 7, 5)
    assert "expected one JSON object" in index.errors[0]


def test_a_compressed_file_is_read_too(tmp_path: Path):
    path = tmp_path / "samples.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(record(number)) + "\n" for number in range(5))
    index = SampleIndex(path)
    index.extend()
    assert index.record(4)["index"] == 4


@pytest.mark.parametrize("limit", [1000, 1_000_000], ids=["beside it", "in the cache"])
def test_the_index_of_a_file_is_stored_and_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int):
    monkeypatch.setattr(sample_index, "CACHED_BYTES", 1000)
    monkeypatch.setattr(sample_index, "STORED_BYTES", limit)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "samples.jsonl"
    write(path, [record(number) for number in range(20)])
    index = SampleIndex(path)
    index.extend()
    assert index.stored_path.exists()
    assert index.stored_path.is_relative_to(tmp_path / "cache") == (limit > 1000)
    write(path, [record(20)], "a")
    later = SampleIndex(path)
    assert len(later) == 20  # before anything is read
    later.extend()
    np.testing.assert_equal(later.columns()["index"], np.arange(21))
    assert SampleIndex(path, reward_key="score").columns()["index"].size == 0  # other numbers


def test_the_cache_drops_its_older_half_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sample_index, "CACHED_BYTES", 1)
    monkeypatch.setattr(sample_index, "MAX_CACHED", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    indexes = []
    for number in range(5):
        write(path := tmp_path / f"{number}.jsonl", [record(number)])
        indexes.append(SampleIndex(path))
        indexes[-1].extend()
        os.utime(indexes[-1].stored_path, (number, number))
    assert [index.stored_path.exists() for index in indexes] == [False, False, True, True, True]


@pytest.mark.parametrize("damage", ["other content", "other middle", "shorter", "not an index", "pickle"])
def test_a_stored_index_of_another_content_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str):
    monkeypatch.setattr(sample_index, "CACHED_BYTES", 1000)
    monkeypatch.setattr(sample_index, "FINGERPRINT_BYTES", 500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "samples.jsonl"
    write(path, [record(number) for number in range(20)])
    SampleIndex(path).extend()
    stored = SampleIndex(path).stored_path
    if damage == "other content":
        path.write_bytes(path.read_bytes().replace(b"prompt 0", b"PROMPT 0"))
    elif damage == "other middle":
        path.write_bytes(path.read_bytes().replace(b"prompt 2", b"PROMPT 2"))
        os.utime(path, ns=(0, 0))
    elif damage == "shorter":
        write(path, [record(7)])
    elif damage == "not an index":
        stored.write_bytes(b"\x93NUMPY nonsense")
    else:
        np.savez(stored.open("wb"), header=np.array([{"format": 1}], dtype=object))
    index = SampleIndex(path)
    assert len(index) == 0
    index.extend()
    assert len(index) == len(path.read_text().splitlines())


def test_a_read_that_is_cut_into_slices_gives_the_same_index(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    random.seed(1)
    write(path, [record(number, reward=random.random()) for number in range(3000)])
    whole, sliced = SampleIndex(path), SampleIndex(path)
    whole.extend()
    slices = 0
    while not sliced.extend(0.0):
        slices += 1
    assert slices == 6
    for name, column in whole.columns().items():
        np.testing.assert_array_equal(column, sliced.columns()[name])


@pytest.mark.parametrize("text", ['a "quoted" word', "naïve Ω", "back\\slash", "line\nbreak", "😀", "\ud800", "CaSe"])
@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 700, 1 << 24])
def test_a_text_is_found_however_json_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, ascii_only: bool, chunk_bytes: int
):
    monkeypatch.setattr(sample_index, "SEARCHED_BYTES", chunk_bytes)
    lines = [
        record(number, response=f"before {text} after {text}" if number in (2, 3, 9) else "none")
        for number in range(10)
    ]
    texts = [json.dumps(line, ensure_ascii=ascii_only) for line in lines]
    path = tmp_path / "samples.jsonl"
    path.write_bytes("\n".join(texts).encode("utf-8", "surrogatepass"))
    index = SampleIndex(path)
    index.extend()
    assert len(index) == (10 if ascii_only or text != "\ud800" else 7)  # half a pair is no UTF-8
    if len(index) == 10:
        assert index.search(text) == index.search(text.replace("C", "c")) == [2, 3, 9]
        assert index.search(text + "!") == []


def test_samples_get_the_numbers_of_their_training(tmp_path: Path):
    samples, training = tmp_path / "samples.jsonl", tmp_path / "train_data.jsonl"
    write(samples, [record(number, tokens=[number, 2, 3, 4]) for number in range(4)])
    trained = {"advantages": [2.0, 9.0, 1.0], "old_log_probs": [-1.5, 0.0, -2.0], "ratios": [1.0, 1.0, 1.25]}
    write(training, [
        record(2, tokens=[99, 2, 3, 4], **trained),  # another branch of the attempt
        record(2, tokens=[2, 2, 3, 4], **(trained | {"ratios": [1.0, 1.0, 0.5]})),
        record(0, tokens=[0, 2, 3, 4], **trained),
    ])  # fmt: skip
    index = TrainedSampleIndex(samples, training)
    assert index.extend()
    np.testing.assert_equal(index.columns()["advantage"], [1.5, math.nan, 1.5, math.nan])
    np.testing.assert_equal(index.columns()["mismatch"], [0.25, math.nan, 0.25, math.nan])
    assert index.training_record(2)["ratios"] == [1.0, 1.0, 0.5]
    assert "ratios" not in index.training_record(1)


def test_samples_that_are_numbered_within_their_groups_get_their_own_training(tmp_path: Path):
    samples, training = tmp_path / "samples.jsonl", tmp_path / "train_data.jsonl"
    write(samples, [record(number % 2, group_index=number // 2) for number in range(4)])
    write(training, [record(0, group_index=group, advantages=[1.0, 0.0, group]) for group in (1, 0)])
    index = TrainedSampleIndex(samples, training)
    assert index.extend()
    np.testing.assert_equal(index.columns()["advantage"], [0.5, math.nan, 1.0, math.nan])
    assert index.rows_without_training() == [1, 3]
    assert index.training_record(2)["advantages"] == [1.0, 0.0, 1]
