"""Samples of several rollouts, joined end to end, keep their groups apart."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from slimectl.data.group_numbers import GroupNumbers
from slimectl.data.jsonl import read_samples
from slimectl.errors import RecordError, SettingsError
from slimectl.types import Sample

Row = tuple[int, int, str]
"""group_index, index and prompt of a sample."""


def numbered(*rows: Row, rollout_ids: list[int | None] | None = None) -> list[tuple[int, int, str]]:
    numbers = GroupNumbers()
    samples = [Sample(group_index=group, index=index, prompt=prompt) for group, index, prompt in rows]
    for line, sample in enumerate(samples, start=1):
        sample.rollout_id = rollout_ids[line - 1] if rollout_ids else None
        numbers.renumber(sample, f"a.jsonl:{line}")
    return [(sample.group_index, sample.index, str(sample.prompt)) for sample in samples]


FIRST = [(0, 0, "a"), (0, 1, "a"), (1, 2, "b"), (1, 3, "b")]
SECOND = [(0, 0, "c"), (0, 1, "c"), (1, 2, "d"), (1, 3, "d")]


@pytest.mark.parametrize(
    "rows",
    [
        FIRST,
        FIRST[::-1],
        [FIRST[i] for i in (2, 0, 3, 1)],
        [(7, 0, "a"), (7, 1, "a"), (9, 0, "b"), (9, 1, "b")],  # an index may start at 0 in every group
        [(3, 5, "a"), (3, 5, "a"), (3, 6, "a")],  # parts of one execution share its index
    ],
)
def test_samples_of_one_rollout_keep_their_numbers(rows: list[Row]):
    assert numbered(*rows) == rows


def test_a_second_rollout_is_counted_on():
    assert numbered(*FIRST, *SECOND)[4:] == [(4, 4, "c"), (4, 5, "c"), (5, 6, "d"), (5, 7, "d")]


def test_the_same_rollout_twice_is_two_rollouts():
    assert numbered(*FIRST, *FIRST)[4:] == [(4, 4, "a"), (4, 5, "a"), (5, 6, "b"), (5, 7, "b")]


def test_rollouts_of_one_prompt_each_are_told_apart():
    assert numbered((0, 0, "a"), (0, 1, "a"), (0, 0, "b"), (0, 1, "b"))[2:] == [(2, 2, "b"), (2, 3, "b")]


def test_a_rollout_whose_first_prompts_were_left_out_is_told_apart():
    rows = numbered(*FIRST, (1, 2, "d"), (1, 3, "d"), (2, 4, "e"), (0, 0, "f"), (1, 2, "g"))
    groups = {prompt: group for group, _, prompt in rows}
    assert len(set(groups.values())) == len(groups) == 6


def test_a_file_that_was_cut_within_a_group_is_joined_again():
    assert numbered(*FIRST[:3], *FIRST[3:]) == FIRST


def test_parts_of_an_execution_may_have_prompts_of_their_own():
    rows = [(0, 0, "ask"), (0, 1, "search"), (0, 2, "ask")]
    assert numbered(*rows, rollout_ids=[4, 4, 5]) == rows
    others = [(0, 0, "tell"), (0, 1, "search"), (0, 2, "tell")]
    assert numbered(*rows, *others, rollout_ids=[4, 4, 5] * 2)[3:] == [(6, 6, "tell"), (6, 7, "search"), (6, 8, "tell")]


def test_two_prompts_in_one_group_are_refused():
    with pytest.raises(RecordError, match=r"a\.jsonl:2: group 4 has the prompt 'b' here and another one in a\.jsonl:1"):
        numbered((4, 0, "a"), (4, 1, "b"))


@pytest.mark.parametrize(
    "rows",
    [
        [row for pair in zip(FIRST, SECOND, strict=True) for row in pair],
        [*FIRST[:1], *SECOND, *FIRST[1:]],
    ],
)
def test_rollouts_that_are_mixed_are_refused(rows: list[Row]):
    with pytest.raises(RecordError, match="Join rollouts end to end"):
        numbered(*rows)


def write(path: Path, rows: list[Row]) -> str:
    objects = [{"group_index": group, "index": index, "prompt": prompt, "tokens": [1]} for group, index, prompt in rows]
    path.write_text("".join(json.dumps(item) + "\n" for item in objects))
    return str(path)


def groups(samples: list[Sample]) -> list[tuple[int, str]]:
    return [(sample.group_index, str(sample.prompt)) for sample in samples]


def test_files_are_read_end_to_end(tmp_path: Path):
    one, two = write(tmp_path / "one.jsonl", FIRST), write(tmp_path / "two.jsonl", SECOND)
    joined = groups(list(read_samples([one, two])))
    assert joined == [(0, "a"), (0, "a"), (1, "b"), (1, "b"), (4, "c"), (4, "c"), (5, "d"), (5, "d")]
    both = tmp_path / "both.jsonl"
    both.write_bytes(Path(one).read_bytes() + Path(two).read_bytes())
    assert groups(list(read_samples(both))) == joined


@pytest.mark.parametrize(
    ("part", "prompts"), [("1:3", "ab"), (":2", "aa"), ("2:", "bb"), ("-1:", "b"), (":-3", "a"), ("-3:-1", "ab")]
)
def test_a_slice_has_the_lines_that_python_would_take(tmp_path: Path, part: str, prompts: str):
    path = write(tmp_path / "one.jsonl", FIRST)
    samples = list(read_samples(f"{path}@[{part}]"))
    assert "".join(str(sample.prompt) for sample in samples) == prompts
    assert [(s.group_index, s.index, s.prompt) for s in samples] == FIRST[
        slice(*(int(n) if n else None for n in part.split(":")))
    ]


@pytest.mark.parametrize("part", ["4:9", "3:1", "-0:-9"])
def test_an_empty_slice_is_named(tmp_path: Path, part: str):
    path = write(tmp_path / "one.jsonl", FIRST)
    with pytest.raises(SettingsError, match=r"one\.jsonl@\[.*\]: the file has no lines there"):
        list(read_samples(f"{path}@[{part}]"))


def test_a_compressed_file_is_recognized_whatever_its_name(tmp_path: Path):
    path = tmp_path / "one.jsonl"
    write(path, FIRST)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert groups(list(read_samples(path))) == [(0, "a"), (0, "a"), (1, "b"), (1, "b")]


@pytest.mark.parametrize(
    ("start", "kind"),
    [(b"PAR1", "a Parquet file"), (b"BZh91AY", "bzip2 -dc"), (b"\xfd7zXZ\x00", "xz -dc"), (b"PK\x03\x04", "unzip -p")],
)
def test_other_formats_are_named(tmp_path: Path, start: bytes, kind: str):
    (tmp_path / "a.jsonl").write_bytes(start + bytes(100))
    with pytest.raises(RecordError, match=kind):
        next(read_samples(tmp_path / "a.jsonl"))
