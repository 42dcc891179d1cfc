"""Labels that are lists of accepted answers: the best one counts, in every verifier that compares with a label."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from workshop import Workshop

from slimectl.errors import RecordError
from slimectl.rewards import verifier
from slimectl.types import Sample

TABLE: list[tuple[str, dict[str, Any], list[Any], str, float]] = [
    ("exact", {}, ["Lyon", "Paris"], "Paris", 1.0),
    ("exact", {}, ["Lyon", "Rome"], "Paris", 0.0),
    ("exact", {}, [4.0, "four"], "4", 1.0),
    ("contains", {}, ["Lyon", "Paris"], "It is Paris.", 1.0),
    ("numeric", {}, [1, 0.5], "1/2", 1.0),
    ("numeric", {}, [1, 2], "1/2", 0.0),
    ("regex", {"pattern": r"is (\w+)"}, ["Lyon", "Paris"], "is Paris", 1.0),
    ("regex", {}, [r"^\d+$", r"^[a-z]+$"], "abc", 1.0),
    ("f1", {}, ["Tower of London", "Eiffel Tower Paris"], "Eiffel Tower", 0.8),  # 2 * 2 / (2 + 3)
    ("math", {}, ["3", r"\frac{1}{2}"], r"\boxed{0.5}", 1.0),
    ("deepscaler", {}, ["3", "0.5"], r"<think>x</think> \boxed{\frac12}", 1.0),
    ("boxed_exact", {}, ["A", "B"], r"\boxed{B}", 1.0),
]


@pytest.mark.parametrize(("rm_type", "options", "labels", "response", "reward"), TABLE)
def test_any_label_of_a_list_is_right(
    rm_type: str, options: dict[str, Any], labels: list[Any], response: str, reward: float
):
    assert verifier(rm_type, **options)(Sample(response=response, label=labels)) == pytest.approx(reward)


def test_a_reward_that_is_an_object_is_compared_by_its_score():
    grade = verifier("dapo")(Sample(response="Answer: 5", label=["4", "5"]))
    assert grade == {"score": 1.0, "acc": 1.0, "pred": "5"}
    assert verifier("dapo")(Sample(response="Answer: 6", label=["4", "5"]))["score"] == -1.0  # type: ignore[index]


def test_the_reason_names_the_label_that_decided():
    explain = verifier("exact").explain
    assert explain(Sample(response="b", label=["a", "b"])).why == "is the label 'b' (label 2 of 2)"
    assert explain(Sample(response="c", label=["a", "b"])).why == "is not the label 'a' (label 1 of 2)"
    assert verifier("exact", source="answer_tag").explain(Sample(response="b", label=["a", "b"])).why == (
        "no closed <answer> tag"
    )
    assert verifier("regex").extract(Sample(response="7 b", label=["c", r"\d"])) == "7"


@pytest.mark.parametrize(
    ("rm_type", "label", "message"),
    [
        ("exact", [], "the list of accepted answers is empty"),
        ("math", ["1", None], "contains something other than strings and numbers"),
        ("f1", [["a"]], "contains something other than strings and numbers"),
        ("gpqa", ["A", "B"], "a list, but the gpqa verifier needs a string or a number"),
        ("exact", {"target": ["a"]}, "an object, but the exact verifier"),
    ],
)
def test_labels_without_a_meaning_are_refused(rm_type: str, label: Any, message: str):
    with pytest.raises(RecordError, match=message):
        verifier(rm_type)(Sample(response="A", label=label))


def test_a_list_in_a_parquet_file_reaches_rewards_of_every_kind(workshop: Workshop):
    rows = [{"prompt": "ab", "reward_model": {"style": "rule", "ground_truth": ["zz", "say"]}}]
    pq.write_table(pa.Table.from_pylist(rows), workshop.folder / "rows.parquet")
    common = ["--data", "rows.parquet", "--label-key", "reward_model.ground_truth", "-n", "2"]
    workshop.slimectl("rollout", *common, "--model", str(workshop.model), "--out", "s.jsonl")
    lines = [json.loads(line) for line in (workshop.folder / "s.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == [["zz", "say"]] * 2
    lines[0]["response"], lines[1]["response"] = "say", "sax"
    (workshop.folder / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = workshop.slimectl("score", "s.jsonl", "--rm-type", "exact", "-s", "score.custom_rm_path=none", "--explain")
    graded = [json.loads(line) for line in out.splitlines()]
    assert [line["reward"] for line in graded] == [1.0, 0.0]
    assert graded[0]["metadata"]["explanation"]["why"] == "is the label 'say' (label 2 of 2)"
    (workshop.folder / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str in ground_truth)\n"
    )
    out = workshop.slimectl("score", "s.jsonl", "--custom-rm-path", "own.py:compute_score")
    assert [json.loads(line)["reward"] for line in out.splitlines()] == [1.0, 0.0]
