"""Prompt sources: files of every kind, slices, globs, functions and tasks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from slimectl.data.json_values import jsonable
from slimectl.data.prompts import open_prompts
from slimectl.errors import HookError, RecordError, SettingsError, SlimectlError
from slimectl.types import Prompt

ROWS = [{"prompt": f"{i}+1=", "label": str(i + 1), "metadata": {"i": i}} for i in range(10)]


def texts(*sources: str, **options: Any) -> list[Any]:
    return [prompt.text for prompt in open_prompts([str(source) for source in sources], **options)]


def expected(*numbers: int) -> list[str]:
    return [f"{i}+1=" for i in numbers]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "ten.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    return path


def as_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=1))


def as_gz(path: Path) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))


def as_csv(path: Path) -> None:
    lines = [f'"{row["prompt"]}",{row["label"]},"{{""i"": {i}}}"' for i, row in enumerate(ROWS)]
    path.write_text("prompt,label,metadata\n" + "\n".join(lines) + "\n", encoding="utf-8-sig")


def as_parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [("p.json", as_json), ("p.jsonl.gz", as_gz), ("p.csv", as_csv), ("p.parquet", as_parquet)],
)
def test_every_kind_of_file_gives_the_same_prompts(
    tmp_path: Path, jsonl: Path, name: str, write: Callable[[Path], None]
):
    write(tmp_path / name)
    for options in ({}, {"start": 7}, {"epochs": 3, "start": 14}, {"shuffle_seed": 5, "epochs": 2, "start": 3}):
        given = list(open_prompts([str(tmp_path / name)], **options))
        assert given == list(open_prompts([str(jsonl)], **options))
    assert given[0].index == 3
    assert isinstance(given[0].metadata["i"], int)


@pytest.mark.parametrize(
    ("slice_", "rows"),
    [("[2:4]", (2, 3)), ("[:2]", (0, 1)), ("[8:]", (8, 9)), ("[-2:]", (8, 9)), ("[:-8]", (0, 1)),
     ("[-3:-1]", (7, 8)), ("[7:99]", (7, 8, 9))],
)  # fmt: skip
def test_slices_are_pythons(jsonl: Path, slice_: str, rows: tuple[int, ...]):
    assert texts(f"{jsonl}@{slice_}") == expected(*rows)
    assert texts(f"{jsonl}@{slice_}", start=1) == expected(*rows[1:])
    assert sorted(texts(f"{jsonl}@{slice_}", shuffle_seed=0)) == expected(*rows)


def test_glob_is_read_in_the_order_of_names(tmp_path: Path, jsonl: Path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "last"}\n')
    jsonl.rename(tmp_path / "a.jsonl")
    assert texts(f"{tmp_path}/*.jsonl@[8:]") == [*expected(8, 9), "last"]
    with pytest.raises(SettingsError, match="no file matches"):
        texts(f"{tmp_path}/*.parquet")


def test_sources_that_are_not_there_are_refused_before_anything_is_read(tmp_path: Path):
    (tmp_path / "empty.jsonl").touch()
    for source, message in [
        (str(tmp_path / "none.jsonl"), "no such prompt file"),
        ("https://host/a.jsonl@[0:3]", "https://host/a.jsonl: an address, and data is read from files only"),
        ("s3://bucket/a.parquet", "s3://bucket/a.parquet: an address"),
        (str(tmp_path), "a directory; give its files"),
        ("no_such_module:prompts", "importing no_such_module failed"),
        (f"{tmp_path}/none.py:prompts", "no such file"),
        ("json:nothing", "json has no such name: nothing"),
    ]:
        with pytest.raises(SettingsError, match=message):
            open_prompts([source])
    with pytest.raises(SettingsError, match="no prompt source"):
        open_prompts([])
    for options in ({}, {"shuffle_seed": 1}, {"epochs": None}):
        with pytest.raises(SettingsError, match=r"empty\.jsonl: no rows"):
            next(open_prompts([str(tmp_path / "empty.jsonl")], **options))


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("p.csv", b"prompt,label\nfine,1\nonly\n", r"p\.csv:3: not as many columns as the 2 of the header"),
        ("p.csv", b"prompt,label\nfine,1\n\xff,2\n", r"p\.csv:3: not UTF-8 at byte 1; save the file as UTF-8"),
        ("p.csv", b'prompt,label\nfine,1\n"open,2\n', r"p\.csv:3: not CSV: unexpected end of data"),
        ("p.CSV", b"prompt,label,prompt\na,1,b\n", r"p\.CSV:1: two columns are called 'prompt'; rename one"),
        ("p.json", b'[{"prompt": "x"}', r"p\.json: not JSON that can be read: Expecting ',' delimiter"),
        ("p.json", b'[{"prompt": "x", "metadata": {"a": NaN}}]', r"p\.json: not JSON .*NaN is not a JSON number"),
        ("p.json", b"[" * 100_000, r"p\.json: not JSON that can be read: maximum recursion"),
    ],
)
def test_files_that_are_broken_are_named_with_the_line(tmp_path: Path, name: str, body: bytes, message: str):
    (tmp_path / name).write_bytes(body)
    with pytest.raises(RecordError, match=message):
        texts(tmp_path / name)
    with pytest.raises(SettingsError, match=r"no file matches; a slice is written path@\[a:b\]"):
        texts(f"{tmp_path / name}@[1]")


def test_tables_of_other_programs_hold_more_than_json(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    when = datetime(2026, 1, 2, tzinfo=UTC)
    parquet.write_table(pa.table({"prompt": ["x"], "metadata": [{"at": when, "n": 3}]}), tmp_path / "p.parquet")
    (prompt,) = open_prompts([str(tmp_path / "p.parquet")])
    assert prompt.metadata == {"at": str(when), "n": 3}
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    parquet.write_table(twice, tmp_path / "q.parquet")
    with pytest.raises(RecordError, match="two columns are called 'prompt'"):
        texts(tmp_path / "q.parquet")


SOURCE = """
from slimectl.types import Prompt
def rows(size=3, word="x"):
    for i in range(size):
        yield {"prompt": f"{word}{i}", "label": i}
def listed():
    return [Prompt("a", label="b")]
def failing():
    yield {"prompt": "fine"}
    1 / 0
"""


def test_functions_are_sources(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    assert texts(f"{file}:rows?size=2&word=a b", epochs=2) == ["a b0", "a b1"] * 2
    assert sorted(texts(f"{file}:rows", shuffle_seed=1)) == ["x0", "x1", "x2"]
    assert texts(f"{file}:rows@[1:]") == ["x1", "x2"]
    assert list(open_prompts([f"{file}:listed"], epochs=2))[1] == Prompt("a", label="b", index=1)
    with pytest.raises(SettingsError, match="unexpected keyword argument 'sizes'"):
        texts(f"{file}:rows?sizes=2")
    with pytest.raises(HookError, match="failing raised ZeroDivisionError: division by zero"):
        texts(f"{file}:failing")


def test_reasoning_gym_tasks_are_sources():
    pytest.importorskip("reasoning_gym")
    source = "reasoning_gym:chain_sum?size=4&seed=3&min_terms=2&max_terms=2"
    first = next(open_prompts([source]))
    assert first.text == "State the final answer to the following arithmetic problem: 57 - 87 ="
    assert first.label == "-30"
    assert first.metadata["rm_type"] == "reasoning_gym"
    assert first.metadata["source_dataset"] == "chain_sum"
    assert first.metadata["entry"]["metadata"]["expression"] == "57 - 87"
    assert json.loads(json.dumps(first.metadata)) == first.metadata
    assert texts(source, start=2) == texts(source)[2:]
    assert texts("reasoning_gym:chain_sum?size=2") == texts("reasoning_gym:chain_sum?size=2")
    with pytest.raises(SettingsError, match="'no_such_task' not registered"):
        texts("reasoning_gym:no_such_task")


def test_jsonable_knows_what_programs_make():
    import numpy

    value = {1: (2, {3}), "n": numpy.int64(4), "f": 0.5, "none": None, "o": SlimectlError("x")}
    assert jsonable(value) == {"1": [2, [3]], "n": 4, "f": 0.5, "none": None, "o": "x"}
