"""A record names code only where the settings allow it; --on-error skip leaves out, and counts, what has no reward."""

from __future__ import annotations

import json
from typing import Any

import pytest
from workshop import Workshop

from slimectl.data.json_codec import decode_json
from slimectl.data.jsonl import parse_line
from slimectl.data.skip_counts import SkippedLines, locate
from slimectl.errors import RecordError

SAMPLE = {"group_index": 0, "index": 0, "prompt": "x", "tokens": [1, 2], "response": "b", "response_length": 1,
          "label": "b", "status": "completed"}  # fmt: skip
EVIL = "import pathlib\npathlib.Path('proof').touch()\ndef reward(sample): return 7.0\n"


def write(workshop: Workshop, *changes: dict[str, Any] | str) -> None:
    """samples.jsonl: a good sample with each of the changes, or a text as it stands."""
    lines = [
        change if isinstance(change, str) else json.dumps({**SAMPLE, "index": i, "group_index": i, **change})
        for i, change in enumerate(changes)
    ]
    (workshop.folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    (workshop.folder / "evil.py").write_text(EVIL)


def test_a_sample_that_names_code_is_refused_with_its_line_and_the_way_out(workshop: Workshop):
    write(workshop, {}, {"custom_rm_path": "evil.py:reward"})
    workshop.slimectl("score", "samples.jsonl", "--rm-type", "exact", code=3)
    assert workshop.stderr.splitlines()[-1] == (
        "slimectl: samples.jsonl:2: Sample.custom_rm_path: 'evil.py:reward' refers to code, and records may not choose "
        "the code to run. Remove the key, or set score.allow_paths_in_records = true if you trust the file."
    )
    assert not (workshop.folder / "proof").exists()
    allowed = ("-s", "score.allow_paths_in_records=true")
    out = workshop.slimectl("score", "samples.jsonl", "--rm-type", "exact", *allowed)
    assert [json.loads(line)["reward"] for line in out.splitlines()] == [1.0, 7.0]
    assert (workshop.folder / "proof").exists()


BAD = [
    ({"label": None}, "label: missing, but the exact verifier needs it"),
    ({"metadata": {"rm_type": "exakt"}}, "metadata.rm_type: score.rm_type: no verifier 'exakt'. Did you mean exact?"),
    ({"metadata": {"rm_type": "remote_rm"}}, "metadata.rm_type: score.rm_options.url: missing"),
    (json.dumps(SAMPLE)[:-1] + ', "note": 1e999}', "not JSON that can be read: 1e999 is too large for a float"),
    ({"custom_rm_path": "evil.py:reward"}, "Sample.custom_rm_path: 'evil.py:reward' refers to code"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_cannot_be_graded_stops_with_its_line_or_is_skipped(
    workshop: Workshop, change: dict[str, Any] | str, words: str, workers: str
):
    write(workshop, {}, change, {"response": "no"})
    command = ("score", "samples.jsonl", "--rm-type", "exact", "--workers", workers)
    workshop.slimectl(*command, code=3)
    assert workshop.stderr.splitlines()[-1].startswith("slimectl: samples.jsonl:2: ")
    assert words in workshop.stderr
    out = workshop.slimectl(*command, "--on-error", "skip")
    assert [json.loads(line)["reward"] for line in out.splitlines()] == [1.0, 0.0]
    named, last, total = workshop.stderr.splitlines()
    assert named.startswith("skipped: samples.jsonl:2: ")
    assert words in named
    assert last == "2 samples, mean reward 0.5"
    assert total.startswith("samples.jsonl: 1 of 3 lines skipped: 1 ")


def test_lines_that_were_skipped_are_no_gap_for_work_that_goes_on(workshop: Workshop):
    write(workshop, *[{"label": None} if i % 3 == 1 else {} for i in range(12)])
    command = ("score", "samples.jsonl", "--out", "scored.jsonl", "--on-error", "skip", "--rm-type", "exact")
    workshop.slimectl(*command)
    whole = (workshop.folder / "scored.jsonl").read_bytes()
    partial = workshop.folder / "scored.jsonl.partial"
    partial.write_bytes(b"".join(whole.splitlines(keepends=True)[:4]))
    facts = (workshop.folder / "scored.jsonl.manifest.json").read_text()
    (workshop.folder / "scored.jsonl.partial.manifest.json").write_text(facts)
    (workshop.folder / "scored.jsonl").unlink()
    workshop.slimectl(*command)
    assert (workshop.folder / "scored.jsonl").read_bytes() == whole
    assert "continuing after 4 samples of an interrupted attempt." in workshop.stderr
    assert workshop.stderr.splitlines()[-1].startswith(
        "samples.jsonl: 4 of 12 lines skipped: 2 left out before; 2 label: missing"
    )


def test_reasons_are_counted_and_only_the_first_lines_named():
    words: list[str] = []
    skipped = SkippedLines("a.jsonl", words.append)
    for number in range(1, 8):
        skipped.add_bad_line(RecordError(f"a.jsonl:{number}: not JSON: Extra data at column {number}"))
    skipped.add_line("a.jsonl:8")
    skipped.add_ungraded(RecordError("sample 3: label: missing"))
    skipped.add_line("a.jsonl:9")
    assert skipped.pass_line() == "a.jsonl:9"
    skipped.report()
    assert [line.split(": ")[1] for line in words[:-1]] == [f"a.jsonl:{number}" for number in range(1, 6)]
    assert words[-1] == "a.jsonl: 8 of 9 lines skipped: 7 not JSON: Extra data at column 1; 1 label: missing"


def test_an_error_is_located_once():
    assert str(locate(RecordError("sample 1: bad"), "a.jsonl:2")) == "a.jsonl:2: sample 1: bad"
    assert str(locate(RecordError("a.jsonl:7: bad"), "a.jsonl:2")) == "a.jsonl:7: bad"


@pytest.mark.parametrize("text", ["1e999", "-1E+400", '{"a": [1e310]}'])
def test_a_number_beyond_a_float_is_no_json(text: str):
    with pytest.raises(ValueError, match="is too large for a float"):
        decode_json(text)
    with pytest.raises(RecordError, match=r"^f:1: not JSON that can be read: .* is too large for a float"):
        parse_line(f'{{"x": {text}}}'.encode(), location="f:1")


def test_large_and_tiny_exponents_are_numbers():
    assert decode_json("[1e308, 1e-999, 1e+100]") == [1e308, 0.0, 1e100]
