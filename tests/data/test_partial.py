"""Unfinished outputs: what of last time is trusted, and what is cut off."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from slimectl.data.jsonl import read_samples
from slimectl.data.manifest import Manifest, manifest_path
from slimectl.data.resumable import ResumableOutput, can_be_resumable
from slimectl.errors import RecordError, StorageError
from slimectl.types import Sample


def manifest(setting: int = 1) -> Manifest:
    return Manifest("score", {"setting": setting}, {"samples.jsonl": "abc"})


def begun(out: Path, groups: list[int], setting: int = 1) -> Path:
    """Samples of these groups, written without an end; where they are."""
    with ResumableOutput(str(out), manifest(setting)) as partial:
        for index, group in enumerate(groups):
            partial.write(Sample(index=index, group_index=group, reward=float(index)))
    return partial.path


def indices(out: Path, *, setting: int = 1, whole_groups: bool = False) -> list[int]:
    with ResumableOutput(str(out), manifest(setting)) as partial:
        found = [sample.index for sample in partial.done(whole_groups=whole_groups)]
        assert partial.count == len(found)
        return found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "scored.jsonl"


def test_what_was_written_is_there_until_it_is_committed(out: Path):
    path = begun(out, [0, 0, 1])
    assert (path.name, out.exists()) == ("scored.jsonl.partial", False)
    with ResumableOutput(str(out), manifest()) as partial:
        assert [sample.reward for sample in partial.done()] == [0.0, 1.0, 2.0]
        partial.write(Sample(index=3, reward=3.0))
        partial.commit()
    assert [sample.index for sample in read_samples(out)] == [0, 1, 2, 3]
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(
    ("groups", "kept"), [([0, 0, 1, 1], [0, 1]), ([0, 0, 0], []), ([0, 1, 2], [0, 1]), ([0, 0, 1], [0, 1])]
)
def test_the_last_group_is_not_trusted_to_be_whole(out: Path, groups: list[int], kept: list[int]):
    begun(out, groups)
    assert indices(out, whole_groups=True) == kept
    if kept:
        assert indices(out) == kept  # the rest has been cut off


@pytest.mark.parametrize(
    "tail", [b'{"index": 3, "tok', b'{"index": 3}', b"\x00" * 50, b"nonsense\n", b'{"index": "x"}\n']
)
def test_a_torn_end_is_cut_off(out: Path, tail: bytes):
    path = begun(out, [0, 1, 2])
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert indices(out) == [0, 1, 2]
    assert path.read_bytes() == whole


def test_other_work_begins_anew(out: Path):
    path = begun(out, [0, 1])
    assert indices(out, setting=2) == []
    assert not path.exists()
    begun(out, [0, 1])
    manifest_path(path).unlink()
    assert indices(out) == []


def test_nothing_written_leaves_nothing(out: Path):
    refused = pytest.raises(RecordError, match=r"scored\.jsonl: record 1: reward cannot be written as JSON")
    with refused, ResumableOutput(str(out), manifest()) as partial:
        partial.write(Sample(reward=float("nan")))
    assert list(out.parent.iterdir()) == []


def test_a_compressed_output_is_compressed_at_the_end(tmp_path: Path):
    out = tmp_path / "scored.jsonl.gz"
    path = begun(out, [0, 1])
    assert path.read_bytes().startswith(b"{")
    with ResumableOutput(str(out), manifest()) as partial:
        assert len(list(partial.done())) == 2
        partial.commit()
    assert len(gzip.decompress(out.read_bytes()).splitlines()) == 2
    assert list(tmp_path.iterdir()) == [out]


def test_a_link_is_written_through(tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "there" / "real.jsonl")
    with ResumableOutput(str(tmp_path / "link.jsonl"), manifest()) as partial:
        partial.write(Sample(index=1))
        partial.commit()
    assert [sample.index for sample in read_samples(tmp_path / "there" / "real.jsonl")] == [1]


def test_where_nothing_can_be_kept(tmp_path: Path):
    assert [can_be_resumable(out) for out in ("-", "/dev/null", f"{tmp_path}/no/x", str(tmp_path))] == [False] * 4
    assert can_be_resumable(f"{tmp_path}/x")
    refused = pytest.raises(StorageError, match=r"x\.partial: cannot be written: No such file or directory")
    with refused, ResumableOutput(f"{tmp_path}/no/x", manifest()) as partial:
        partial.write(Sample())
