"""JSON lines: streaming, compressed, refused by line, and never half-written."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimectl.data.io import byte_lines
from slimectl.data.jsonl import read_samples, write_samples
from slimectl.errors import RecordError, SettingsError, StorageError
from slimectl.types import Sample

SAMPLES = [Sample(group_index=i, index=i, prompt=f"é{i}\u2028", metadata={"x": 0.1 * i}) for i in range(5)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str):
    if suffix == ".zst":
        pytest.importorskip("zstandard")
    path = tmp_path / f"samples.jsonl{suffix}"
    assert write_samples(path, SAMPLES) == 5
    assert list(read_samples(path)) == SAMPLES
    first = path.read_bytes()
    write_samples(path, SAMPLES)
    assert path.read_bytes() == first  # the same records, the same bytes
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"reward": NaN}', "NaN is not a JSON number"),
        (b'{"metadata": {"x": -Infinity}}', "-Infinity is not a JSON number"),
        (b'{"index": 1', "not JSON: Expecting ',' delimiter at column 12"),
        (b'{"prompt": "abc', "not JSON: Unterminated string starting at column 12"),
        (b"[1, 2]", "expected one JSON object per line, got list"),
        (b'{"response": "\xff"}', "not UTF-8 at byte 15"),
        (b"[" * 100_000, "not JSON that can be read"),
        (b'{"response_length": 2, "rollout_log_probs": [0.5]}',
         "Sample.rollout_log_probs: 1 values for 2 response tokens"),
    ],
)  # fmt: skip
def test_bad_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, message: str):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"index": 0}\n\n' + line + b"\n")
    samples = read_samples(path)
    assert next(samples).index == 0
    with pytest.raises(RecordError) as error:
        next(samples)
    assert str(error.value).startswith(f"{path}:3: ")
    assert message in str(error.value)


def test_skipping_reports_every_bad_line_and_the_total(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"index": 0}\nnot json\n{"index": "x"}\n{"index": 3}\n')
    assert [sample.index for sample in read_samples(path, on_error="skip")] == [0, 3]
    err = list(caplog.messages)
    assert err[0].startswith(f"skipped: {path}:2: not JSON")
    assert err[1] == f"skipped: {path}:3: Sample.index: expected a whole number, got 'x'"
    assert err[2] == f"{path}: 2 of 4 lines skipped"

    seen: list[RecordError] = []
    assert len(list(read_samples(path, on_error="skip", report=seen.append))) == 2
    assert len(seen) == 2
    assert caplog.messages == err


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_file_that_was_cut_off_is_no_shorter_file(tmp_path: Path, suffix: str):
    if suffix == ".zst":
        pytest.importorskip("zstandard")
    path = tmp_path / f"samples.jsonl{suffix}"
    write_samples(path, [Sample(index=i, group_index=i, response=os.urandom(200).hex()) for i in range(500)])
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(RecordError, match="damaged or truncated"):
        list(read_samples(path))
    seen: list[RecordError] = []
    assert 400 < len(list(read_samples(path, on_error="skip", report=seen.append))) < 500
    assert len(seen) == 1


def test_several_compressed_members_are_one_file(tmp_path: Path):
    path = tmp_path / "samples.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n') + gzip.compress(b'{"a": 2}\n'))
    assert [json.loads(line) for _, line in byte_lines(path)] == [{"a": 1}, {"a": 2}]
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "samples.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"a": 1}\n{"a"') + zstandard.compress(b": 2}"))
    assert [json.loads(line) for _, line in byte_lines(path)] == [{"a": 1}, {"a": 2}]


def test_missing_file_is_an_argument_to_change(tmp_path: Path):
    with pytest.raises(SettingsError, match="no such file"):
        list(read_samples(tmp_path / "nowhere.jsonl"))


def test_nothing_half_written_gets_the_name(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    path.write_text("before\n")

    def interrupted() -> Iterator[Sample]:
        yield SAMPLES[0]
        assert sorted(os.listdir(tmp_path)) == [".tmp-samples.jsonl", "samples.jsonl"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_samples(path, interrupted())
    assert os.listdir(tmp_path) == ["samples.jsonl"]
    assert path.read_text() == "before\n"


def test_link_is_written_through(tmp_path: Path):
    (tmp_path / "real.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    write_samples(tmp_path / "link.jsonl", SAMPLES)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert list(read_samples(tmp_path / "real.jsonl")) == SAMPLES


def test_refusals_of_the_system_say_the_way_out(tmp_path: Path):
    with pytest.raises(StorageError, match=r"no such directory. Create it: mkdir -p .*/deep"):
        write_samples(tmp_path / "deep" / "samples.jsonl", SAMPLES)
    with pytest.raises(StorageError, match="Use another file"):
        write_samples(tmp_path, SAMPLES)
    if os.path.exists("/dev/full"):
        with pytest.raises(StorageError, match=r"/dev/full: cannot be written: No space left on device. Free space"):
            write_samples("/dev/full", SAMPLES)
        assert not os.path.exists("/dev/.tmp-full")


def test_record_that_json_cannot_hold_is_refused(tmp_path: Path):
    with pytest.raises(RecordError, match=r"record 2: rollout_log_probs cannot be written as JSON"):
        write_samples(tmp_path / "s.jsonl", [SAMPLES[0], Sample(response_length=1, rollout_log_probs=[float("nan")])])
    assert os.listdir(tmp_path) == []


def test_half_a_surrogate_pair_survives(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, [Sample(response="cut \ud83d")])
    assert next(read_samples(path)).response == "cut \ud83d"


def test_stdin_and_stdout(monkeypatch: pytest.MonkeyPatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    write_samples("-", SAMPLES)
    written = out.buffer.getvalue()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + written), encoding="ascii"))
    assert list(read_samples("-")) == SAMPLES
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{"), encoding="ascii"))
    with pytest.raises(RecordError, match=r"^<stdin>:1: not JSON"):
        list(read_samples("-"))


def test_every_record_is_on_the_pipe_at_once_and_its_end_is_heard():
    program = (
        "import sys; from slimectl.data.jsonl import JsonlWriter\n"
        "with JsonlWriter('-') as out:\n"
        "    out.write({'n': 1}); sys.stdin.readline(); out.write({'n': 2}); out.write({'n': 3})\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdin
        assert child.stdout
        assert child.stderr
        assert child.stdout.readline() == b'{"n":1}\n'  # while the writer waits for us
        child.stdout.close()
        child.stdin.write(b"\n")
        child.stdin.close()
        assert b"BrokenPipeError" in child.stderr.read()
