"""Versions of a sample's line: 2 has float32 log-probabilities in short decimals, 1 has doubles."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from slimectl.data.jsonl import encode_sample, read_samples, write_samples
from slimectl.data.records import sample_from_json, with_float32
from slimectl.data.sample_index import SampleIndex
from slimectl.errors import RecordError
from slimectl.types import Sample

FLOAT32 = [struct.unpack("<f", struct.pack("<f", value))[0] for value in (-0.1, -1e-7, -12.3456, 0.0)]


def sample(log_probs: list[float], **values: Any) -> Sample:
    return Sample(tokens=[7] * 4, response_length=4, rollout_log_probs=log_probs, **values)


def test_float32_log_probs_take_short_decimals_and_come_back_bit_for_bit(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, [sample(FLOAT32, ref_log_probs=FLOAT32)])
    line = path.read_text()
    assert line.startswith('{"record_version":2,"group_index":0,')
    assert '"rollout_log_probs":[-0.1,-1e-7,-12.3456,0.0]' in line
    [again] = read_samples(path)
    assert again.rollout_log_probs == again.ref_log_probs == FLOAT32
    assert again.extra == {}
    assert encode_sample(again, location="") == line.encode()


@pytest.mark.parametrize("doubles", [[-0.1, -0.2, -0.3, 0.0], [0.0, 0.0, 0.0, 1e300]])
def test_doubles_are_written_whole_in_version_1(tmp_path: Path, doubles: list[float]):
    path = tmp_path / "samples.jsonl"
    write_samples(path, [sample(doubles, ref_log_probs=FLOAT32)])
    assert "record_version" not in json.loads(path.read_text())
    [again] = read_samples(path)
    assert (again.rollout_log_probs, again.ref_log_probs) == (doubles, FLOAT32)


def test_line_of_an_older_slimectl_is_read_with_all_its_digits():
    line = {"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [-0.10000000149011612]}
    assert sample_from_json(line).rollout_log_probs == [-0.10000000149011612]
    assert sample_from_json({**line, "rollout_log_probs": [-0.1]}).rollout_log_probs == [-0.1]
    assert sample_from_json({**line, "record_version": 1, "rollout_log_probs": [-0.1]}).rollout_log_probs == [-0.1]


def test_sample_that_orjson_refuses_keeps_its_numbers(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    written = sample(FLOAT32, response="cut \ud83d", metadata={"large": 2**80})
    write_samples(path, [written])
    assert list(read_samples(path)) == [written]


def test_nan_beside_float32_numbers_is_refused_by_name(tmp_path: Path):
    with pytest.raises(RecordError, match="record 1: metadata cannot be written as JSON: Out of range"):
        write_samples(tmp_path / "s.jsonl", [sample(FLOAT32, metadata={"a": [None, float("nan")]})])


@pytest.mark.parametrize(
    ("version", "message"),
    [(3, "3 is newer than this slimectl supports (2). Update slimectl."),
     (0, "expected a whole number of at least 1, got 0"),
     (True, "got true"), ("2", "got '2'")],
)  # fmt: skip
def test_unknown_version_is_refused(version: Any, message: str):
    with pytest.raises(RecordError) as error:
        sample_from_json({"record_version": version})
    assert str(error.value).startswith("Sample.record_version: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [([0.5, 1e39], "1e+39 is too large for float32"), ([0.5, True], "expected a list of numbers, got true at [1]")],
)
def test_bad_number_of_version_2_is_named(value: list[Any], message: str):
    with pytest.raises(RecordError) as error:
        sample_from_json({"record_version": 2, "response_length": 2, "tokens": [1, 2], "rollout_log_probs": value})
    assert message in str(error.value)


def test_views_show_the_numbers_as_version_1_has_them(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, [sample(FLOAT32)])
    index = SampleIndex(path)
    index.extend()
    record = index.record(0)
    index.close()
    assert record["rollout_log_probs"] == FLOAT32
    assert "record_version" not in record
    assert with_float32({"record_version": 2, "ref_log_probs": "x"}) == {"ref_log_probs": "x"}
