"""Prompt sources: files of every kind, slices, globs, functions and tasks."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from ten_prompts import ROWS, expected, texts

from slimectl.checkpoints.create import byte_tokenizer
from slimectl.data.columns import PromptOptions
from slimectl.data.json_values import jsonable
from slimectl.data.preferences import open_preferences
from slimectl.data.prompts import open_prompts
from slimectl.data.supervised import sft_sample
from slimectl.errors import HookError, RecordError, SettingsError, SlimectlError
from slimectl.rewards.judge import Judge
from slimectl.rewards.text import Exact
from slimectl.stages.evaluate import table_of
from slimectl.types import Prompt, Sample


def as_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=1))


def as_gz(path: Path) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))


def as_csv(path: Path) -> None:
    lines = [f'"{row["prompt"]}",{row["label"]},"{{""i"": {i}}}"' for i, row in enumerate(ROWS)]
    path.write_text("prompt,label,metadata\n" + "\n".join(lines) + "\n", encoding="utf-8-sig")


def as_zst(path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    path.write_bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(lines))


def as_tsv(path: Path) -> None:
    as_csv(path)
    path.write_text(path.read_text("utf-8-sig").replace(",", "\t"))


def as_parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


def as_feather(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    feather = pytest.importorskip("pyarrow.feather")
    feather.write_feather(pyarrow.Table.from_pylist(ROWS), str(path))


def as_stream(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("name", "write"),
    [("p.json", as_json), ("p.jsonl.gz", as_gz), ("p.csv", as_csv), ("p.parquet", as_parquet), ("p.json.gz", as_gz),
     ("P.NDJSON.GZ", as_gz), ("p.Jsonl.Zst", as_zst), ("p.tsv", as_tsv), ("p.PQ", as_parquet), ("p.arrows", as_stream),
     ("p.feather", as_feather), ("p.IPC", as_feather)],
)  # fmt: skip
def test_every_kind_of_file_gives_the_same_prompts(
    tmp_path: Path, jsonl: Path, name: str, write: Callable[[Path], None]
):
    write(tmp_path / name)
    for options in ({}, {"start": 7}, {"epochs": 3, "start": 14}, {"shuffle_seed": 5, "epochs": 2, "start": 3}):
        given = list(open_prompts([str(tmp_path / name)], PromptOptions(**options)))
        assert given == list(open_prompts([str(jsonl)], PromptOptions(**options)))
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
        ("https://host/a.jsonl@[0:3]", "https://host/a.jsonl: a URL, but data is read only from files"),
        ("s3://bucket/a.parquet", "s3://bucket/a.parquet: a URL"),
        (str(tmp_path), "a directory. Give its files"),
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
            next(open_prompts([str(tmp_path / "empty.jsonl")], PromptOptions(**options)))


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("p.csv", b"prompt,label\nfine,1\nonly\n", r"p\.csv:3: the number of columns differs from the 2 of the header"),
        ("p.csv", b"prompt,label\nfine,1\n\xff,2\n", r"p\.csv:3: not UTF-8 at byte 1\. Save the file as UTF-8"),
        ("p.csv", b'prompt,label\nfine,1\n"open,2\n', r"p\.csv:3: not CSV: unexpected end of data"),
        ("p.CSV", b"prompt,label,prompt\na,1,b\n", r"p\.CSV:1: two columns are named 'prompt'\. Rename one"),
        ("p.json", b'[{"prompt": "x"}', r"p\.json: not JSON that can be read: Expecting ',' delimiter"),
        ("p.json", b'[{"prompt": "x", "metadata": {"a": NaN}}]', r"p\.json: not JSON .*NaN is not a JSON number"),
        ("p.json", b"[" * 100_000, r"p\.json: not JSON that can be read: maximum recursion"),
    ],
)
def test_files_that_are_broken_are_named_with_the_line(tmp_path: Path, name: str, body: bytes, message: str):
    (tmp_path / name).write_bytes(body)
    with pytest.raises(RecordError, match=message):
        texts(tmp_path / name)
    with pytest.raises(SettingsError, match=r"no file matches. A slice is written path@\[a:b\]"):
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
    with pytest.raises(RecordError, match="two columns are named 'prompt'"):
        texts(tmp_path / "q.parquet")


def test_columns_of_a_table_keep_their_values(tmp_path: Path):
    """Labels and numbers are what the table shows to a person, whatever the width of their column."""
    import pyarrow as pa
    import pyarrow.feather as feather

    struct = pa.struct([("n", pa.int64()), ("w", pa.float32()), ("cost", pa.decimal128(5, 2))])
    table = pa.table({
        "prompt": pa.array(["a", "b"], pa.large_string()),
        "label": pa.array([Decimal("1.00"), None], pa.decimal128(9, 2)),
        "metadata": pa.array([{"n": 2**60 + 1, "w": 0.1, "cost": Decimal("2.50")}, None], struct),
        "single": pa.array([0.1, 1e20], pa.float32()), "half": pa.array([0.1, None], pa.float16()),
        "double": pa.array([0.1, math.nan]), "unsigned": pa.array([2**64 - 1, 0], pa.uint64()),
        "thousands": pa.array([Decimal("1E+3"), Decimal("-12E+3")], pa.decimal128(5, -3)),
        "day": pa.array([date(2026, 1, 2), None]), "clock": pa.array([time(1, 2, 3), None], pa.time64("us")),
        "zoned": pa.array([datetime(2026, 1, 2, 3, 4, 5), None], pa.timestamp("ns", "+01:00")),
        "raw": pa.array([b"\x00\xff", None]),
        "map": pa.array([[("x", 0.1), ("y", None)], None], pa.map_(pa.string(), pa.float32())),
        "category": pa.array(["u", "v"]).dictionary_encode(),
        "nested": pa.array([[[0.1, None]], None], pa.list_(pa.large_list(pa.float32()))),
        "pair": pa.array([[0.1, 0.2], None], pa.list_(pa.float32(), 2)),
        "inner": pa.array([[{"w": 0.3}], [None]], pa.list_(pa.struct([("w", pa.float32())]))),
    })  # fmt: skip
    feather.write_feather(table, str(tmp_path / "t.feather"))
    first, second = open_prompts([str(tmp_path / "t.feather")])
    assert (first.label, second.label) == ("1.00", None)
    assert first.metadata == {"n": 2**60 + 1, "w": 0.1, "cost": "2.50"}
    assert first.extra == {
        "single": 0.1, "half": 0.1, "double": 0.1, "unsigned": 2**64 - 1, "thousands": "1000", "day": "2026-01-02",
        "clock": "01:02:03", "zoned": "2026-01-02 04:04:05+01:00", "raw": "AP8=", "map": {"x": 0.1, "y": None},
        "category": "u", "nested": [[0.1, None]], "pair": [0.1, 0.2], "inner": [{"w": 0.3}],
    }  # fmt: skip
    numbers = {"single": 1e20, "unsigned": 0, "thousands": "-12000", "category": "v", "inner": [None]}
    assert second.extra == dict.fromkeys(first.extra) | numbers


NUMBERS = """
from datetime import date
from decimal import Decimal
import numpy as np
def rows():
    for label in (np.float32(0.1), Decimal("1.00"), float("nan"), np.int64(7), date(2026, 1, 2), np.float64(42)):
        yield {"prompt": "x", "label": label, "scores": np.array([0.1, 0.25], np.float32), "wide": (np.float64(0.1),)}
"""


def test_values_of_functions_are_those_of_tables(tmp_path: Path):
    (tmp_path / "mine.py").write_text(NUMBERS)
    prompts = list(open_prompts([f"{tmp_path / 'mine.py'}:rows"]))
    assert [prompt.label for prompt in prompts] == [0.1, "1.00", None, 7, "2026-01-02", 42]
    assert prompts[0].extra == {"scores": [0.1, 0.25], "wide": [0.1]}


@pytest.mark.parametrize(
    ("label", "words"),
    [(42.0, "42"), (-7.0, "-7"), (0.5, "0.5"), (1e-05, "0.00001"), (1e22, "1" + "0" * 22), (8, "8"), ("1.0", "1.0")],
)
def test_a_label_is_taught_preferred_judged_and_graded_as_one_text(tmp_path: Path, label: Any, words: str):
    """A null makes whole numbers of a column floats: 42 is stored as 42.0."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    column = pa.array([label, None])
    table = pa.table({"prompt": ["x", "y"], "label": column, "chosen": column, "rejected": ["no", "no"]})
    parquet.write_table(table, tmp_path / "p.parquet")
    source, tokenizer = str(tmp_path / "p.parquet"), byte_tokenizer()
    prompt = next(open_prompts([source]))
    for text in ("x", [{"role": "user", "content": "x"}]):
        tokens, length, _ = sft_sample(Prompt(text, label=prompt.label), tokenizer)
        assert tokenizer.decode(tokens[-length:], skip_special_tokens=True) == words
    pair = next(open_preferences([source]))
    assert pair.chosen.label == words
    sample = Sample(prompt="x", response=words, label=prompt.label, reward=1.0)
    assert Judge(url="http://127.0.0.1:1/v1", template="{label}{response}").question(sample) == words * 2
    assert Exact()(sample) == 1.0
    assert table_of([sample], 1)[0]["label"] == words


def test_a_binary_file_among_json_lines_is_named(tmp_path: Path):
    as_parquet(tmp_path / "p.data")
    with pytest.raises(RecordError, match=r"p\.data: this is a Parquet file\. Prompts can be read from FILE\.parquet"):
        texts(tmp_path / "p.data")


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
    assert list(open_prompts([f"{file}:listed"], PromptOptions(epochs=2)))[1] == Prompt("a", label="b", index=1)
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
