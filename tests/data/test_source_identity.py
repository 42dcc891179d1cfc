"""A resume tells the data of its checkpoint from data that has changed since."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slimectl.data.source_identity import changes, source_identity

ROWS = [{"prompt": f"say {i}", "label": "a"} for i in range(4)]
FUNCTION = "def rows(n=4):\n    return [{'prompt': f'say {i}'} for i in range(n)]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = "".join(f'{{"prompt": "say {i}"}}\n' for i in range(4))
    for name in ("p.jsonl", "parts/a.jsonl", "parts/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(lines)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "p.parquet")
    (tmp_path / "own.py").write_text(FUNCTION)
    return tmp_path


def reverse(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[::-1]))


def drop_first(file: Path) -> None:
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))


CHANGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    # Four lines of `{"prompt": "say N"}` have 4 * 20 bytes.
    "reversed": (
        "p.jsonl",
        lambda at: reverse(at / "p.jsonl"),
        "p.jsonl: changed (80 bytes, with other content now)",
    ),
    "removed": ("p.jsonl", lambda at: drop_first(at / "p.jsonl"), "p.jsonl: changed (80 bytes then, 60 bytes now)"),
    "a slice": ("p.jsonl@[0:2]", lambda at: reverse(at / "p.jsonl"), "p.jsonl@[0:2]: changed"),
    "a glob": ("parts/*.jsonl", lambda at: reverse(at / "parts" / "b.jsonl"), "parts/*.jsonl: changed (160 bytes in 2"),
    "a new file": (
        "parts/*.jsonl",
        lambda at: shutil.copy(at / "p.jsonl", at / "parts" / "c.jsonl"),
        "parts/*.jsonl: changed (160 bytes in 2 files then, 240 bytes in 3 files now)",
    ),
    "Parquet": (
        "p.parquet",
        lambda at: pq.write_table(pa.Table.from_pylist(ROWS[::-1]), at / "p.parquet"),
        "p.parquet: changed",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_files_are_described(folder: Path, case: str):
    source, change, message = CHANGES[case]
    before = [source_identity("own.py:rows"), source_identity(source)]
    assert list(changes(before, [source_identity("own.py:rows"), source_identity(source)])) == []
    change(folder)
    [found] = changes(before, [before[0], source_identity(source)])
    assert found.startswith(message)


def test_functions_are_known_by_their_first_row_and_number(folder: Path):
    before = source_identity("own.py:rows")
    assert (before["rows"], before["first"]) == (4, '{"prompt": "say 0"}')
    fewer = source_identity("own.py:rows?n=3")
    assert list(changes([before], [fewer | {"source": "own.py:rows"}])) == [
        "own.py:rows: changed (4 rows then, 3 rows now)"
    ]


def test_the_same_rows_elsewhere_are_no_change(folder: Path):
    before = source_identity("p.jsonl")
    moved = source_identity(str(shutil.move("p.jsonl", "moved.jsonl")))
    assert before["files"][0][0] == str(folder / "p.jsonl")
    assert list(changes([before], [moved])) == []


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ("p.jsonl", "p.parquet", "p.parquet: replaces p.jsonl"),
        ("p.jsonl@[0:2]", "p.jsonl@[1:3]", "p.jsonl@[1:3]: replaces p.jsonl@[0:2]"),
        ("env", "env:eval", "env:eval: replaces env"),
    ],
)
def test_another_source_is_named(folder: Path, before: str, now: str, message: str):
    assert list(changes([source_identity(before)], [source_identity(now)])) == [message]


def test_a_source_more_or_less_is_named(folder: Path):
    one, two = source_identity("p.jsonl"), source_identity("p.parquet")
    assert list(changes([one], [one, two])) == ["p.parquet: replaces nothing"]
    assert list(changes([one, two], [one])) == ["nothing: replaces p.parquet"]
