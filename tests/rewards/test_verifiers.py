"""The simple verifiers, each as a table: options, label, response, what is extracted, reward."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from slimectl.errors import RecordError, SettingsError
from slimectl.plugins.registry import VERIFIERS
from slimectl.rewards import known_types, verifier
from slimectl.rewards.extraction import find_last_line, find_tagged, last_boxed, text_of
from slimectl.rewards.math.numbers import exact_number, find_last_number, last_number
from slimectl.types import Sample

TABLE = [
    ("exact", {}, "Paris", " Paris\n", "Paris", 1.0),
    ("exact", {}, "Paris", "paris", "paris", 0.0),
    ("exact", {"ignore_case": True}, "Paris", "paris", "paris", 1.0),
    ("exact", {}, 72, "72", "72", 1.0),
    ("exact", {}, 72.0, "72", "72", 1.0),
    ("exact", {"source": "last_line"}, "B", "First A.\nB\n\n", "B", 1.0),
    ("exact", {"source": "boxed"}, "B", r"\boxed{A} \boxed{B}", "B", 1.0),
    ("exact", {"source": "boxed"}, "B", "B", None, 0.0),
    ("exact", {"source": "answer_tag"}, "B", "<answer>A</answer> <answer> B </answer>", "B", 1.0),
    ("exact", {"source": "last_line"}, "", "", None, 0.0),
    ("contains", {}, "Paris", "It is Paris, I think", "It is Paris, I think", 1.0),
    ("contains", {}, "Paris", "It is paris", "It is paris", 0.0),
    ("contains", {"ignore_case": True}, "Paris", "It is paris", "It is paris", 1.0),
    ("contains", {"source": "last_line"}, "A", "A\nB", "B", 0.0),
    ("contains", {}, "", "anything", "anything", 0.0),
    ("numeric", {}, "72", "36 + 36 = 72.", "72", 1.0),
    ("numeric", {}, 72, "so 72.0 apples", "72.0", 1.0),
    ("numeric", {}, "#### 1,234", "$1,234.00", "1,234.00", 1.0),
    ("numeric", {}, "-3", "it is -3", "-3", 1.0),
    ("numeric", {}, "3", "that is 5-3", "3", 1.0),
    ("numeric", {}, "0.5", "1/2", "1/2", 1.0),
    ("numeric", {}, "42", "042", "042", 1.0),
    ("numeric", {}, "1", "1.5", "1.5", 0.0),
    ("numeric", {}, "2", "1,2", "2", 1.0),
    ("numeric", {"tolerance": 0.01}, "3.14159", "3.14", "3.14", 1.0),
    ("numeric", {}, "1/3", "0.333333", "0.333333", 0.0),
    ("numeric", {}, "42", "答案是42。", "42", 1.0),
    ("numeric", {}, "42", "정답은 -1이 아니라 42입니다", "42", 1.0),
    ("numeric", {}, "42", "答えは42です", "42", 1.0),
    ("numeric", {}, "42", "é42", None, 0.0),
    ("numeric", {}, "5", "five", None, 0.0),
    ("numeric", {}, "-5", "it is –5.", "–5", 1.0),
    ("numeric", {}, "5", "from 3–5", "5", 1.0),
    ("numeric", {}, "5", "the result is—5", "5", 1.0),
    ("numeric", {}, "1234", "so 1\u2009234 km", "1\u2009234", 1.0),
    ("numeric", {}, "-1234.5", "－1\u202f234.5", "－1\u202f234.5", 1.0),
    ("numeric", {}, "1234567", r"1{,}234\,567", r"1{,}234\,567", 1.0),
    ("numeric", {}, "234", "1 234", "234", 1.0),
    ("numeric", {}, "5", "1e999", "1e999", 0.0),
    ("numeric", {}, "25", "The area is 25 cm^2.", "25", 1.0),
    ("numeric", {}, "9.8", "9.8 m s^{-2}", "9.8", 1.0),
    ("numeric", {}, "5", "so it is 5, as x_{1} says", "5", 1.0),
    ("numeric", {}, "7", "10^7", "10^7", 0.0),
    ("numeric", {}, "3e8", r"3 \times 10^8 m/s", r"3 \times 10^8", 1.0),
    ("numeric", {}, "0.001", "it is 10⁻³", "10⁻³", 1.0),
    ("numeric", {}, "0.5", r"\dfrac{1}{2}", r"\dfrac{1}{2}", 1.0),
    ("numeric", {}, "-1.5", r"-1\frac{1}{2}", r"-1\frac{1}{2}", 1.0),
    ("numeric", {}, "1/2", "it takes 1 1/2 hours", "1 1/2", 0.0),
    ("numeric", {"source": "answer_tag"}, "5", "<answer>5 of 7</answer> 9", "7", 0.0),
    ("regex", {"pattern": r"Answer: (\w+)"}, "B", "Answer: A. Answer: B", "B", 1.0),
    ("regex", {"pattern": r"(?P<n>\d+) is (?P<answer>\w+)"}, "odd", "7 is odd", "odd", 1.0),
    ("regex", {"pattern": r"\d+"}, "7", "5 and 7", "7", 1.0),
    ("regex", {"pattern": r"answer: (\w+)", "ignore_case": True}, "b", "ANSWER: B", "B", 1.0),
    ("regex", {"pattern": r"Answer: (\w+)"}, "B", "B", None, 0.0),
    ("regex", {"pattern": r"a(x)?"}, "x", "a", None, 0.0),
    ("regex", {}, r"^\d{3}$", "123", "123", 1.0),
    ("regex", {}, r"^\d{3}$", "1234", None, 0.0),
    ("boxed_exact", {}, "B", r"A \boxed{B}", "B", 1.0),
    ("boxed_exact", {}, "B", "B", None, 0.0),
    ("boxed_numeric", {}, "5", r"\boxed{x = 5} 7", "5", 1.0),
    ("boxed_regex", {"pattern": r"\d+"}, "5", r"\boxed{x = 5} 7", "5", 1.0),
    ("boxed_math", {}, "0.5", r"\boxed{\frac12}", r"\frac12", 1.0),
    ("exact", {}, "caf\u00e9", "cafe\u0301", "cafe\u0301", 1.0),  # composed and decomposed
    ("exact", {}, "cafe\u0301", "caf\u00e9", "caf\u00e9", 1.0),
    ("exact", {}, "cafe", "caf\u00e9", "caf\u00e9", 0.0),
    ("exact", {"ignore_case": True}, "CAF\u00c9", "cafe\u0301", "cafe\u0301", 1.0),
    ("exact", {}, "\ud55c\uae00", "\u1112\u1161\u11ab\u1100\u1173\u11af", "\u1112\u1161\u11ab\u1100\u1173\u11af", 1.0),
    ("contains", {}, "\ud55c", "\u1112\u1161\u11ab\u1100\u1173\u11af!", "\u1112\u1161\u11ab\u1100\u1173\u11af!", 1.0),
    ("contains", {}, "caf\u00e9", "a cafe\u0301", "a cafe\u0301", 1.0),
    ("contains", {}, "cafe", "a caf\u00e9", "a caf\u00e9", 0.0),
    ("regex", {"pattern": r"is (\S+)"}, "caf\u00e9", "is cafe\u0301", "cafe\u0301", 1.0),
    ("exact", {"source": "last_line"}, "B", "<think>\nA\n</think>\nB", "B", 1.0),
    ("exact", {"source": "last_line"}, "A", "<think>\nA\n</think>\n", None, 0.0),
    ("contains", {"source": "with_thought"}, "A", "<think>A</think>B", "<think>A</think>B", 1.0),
]


@pytest.mark.parametrize(("rm_type", "options", "label", "response", "extracted", "reward"), TABLE)
def test_verifier(rm_type, options, label, response, extracted, reward):
    sample, grade = Sample(response=response, label=label), verifier(rm_type, **options)
    assert (grade.extract(sample), grade(sample)) == (extracted, reward)


@pytest.mark.parametrize(
    ("rm_type", "options", "first", "second", "same"),
    [
        ("exact", {}, "caf\u00e9", "cafe\u0301", True),
        ("exact", {}, "Paris", "paris", False),
        ("exact", {"ignore_case": True}, "Paris", "paris", True),
        ("regex", {"ignore_case": True}, "Paris", "paris", True),
        ("f1", {}, "the Tower.", "“Tower”。", True),
        ("f1", {}, "Tower", "Eiffel Tower", False),
        ("dapo", {}, "5。", "5.0", True),
        ("gpqa", {}, "B", "（b）", True),
    ],
)
def test_answers_that_a_verifier_holds_equal_vote_together(rm_type, options, first, second, same):
    assert verifier(rm_type, **options).same_answer(Sample(), first, second) is same


@pytest.mark.parametrize(("rm_type", "options", "label", "response", "extracted", "reward"), TABLE)
def test_an_explanation_grades_alike_and_points_at_what_was_graded(
    rm_type, options, label, response, extracted, reward
):
    verdict = verifier(rm_type, **options).explain(Sample(response=response, label=label))
    assert (verdict.reward, verdict.extracted) == (reward, extracted)
    assert extracted is None or response[slice(*verdict.span)] == extracted


WHYS = [
    ("exact", {}, "Paris", "paris", "response", "is not the label 'Paris'"),
    ("exact", {"source": "boxed"}, "B", "B", r"last \boxed{}", r"no \boxed{} or \fbox{}, or the last one never closes"),
    ("contains", {"source": "last_line"}, "B", "A\nB", "last line", "contains the label 'B'"),
    ("numeric", {}, "5", "five", "last number of the response", "no number there"),
    ("regex", {"pattern": "a(x)"}, "x", "b", "last match in the response", "no match of 'a(x)'"),
    ("math", {}, "5", r"\boxed{6\text{ cm}}", r"last \boxed{}", "does not equal the label '5' (read as '6')"),
    ("boxed_numeric", {}, "5", r"\boxed{x=5}", r"last number of the response of the last \boxed{}",
     "is the label '5'"),
    ("exact", {}, "x" * 100, "y", "response", f"is not the label '{'x' * 30}…{'x' * 30}'"),
]  # fmt: skip


@pytest.mark.parametrize(("rm_type", "options", "label", "response", "source", "why"), WHYS)
def test_an_explanation_says_from_where_and_why(rm_type, options, label, response, source, why):
    verdict = verifier(rm_type, **options).explain(Sample(response=response, label=label))
    assert (verdict.source, verdict.why) == (source, why)


def test_the_coin_is_fair_seeded_and_its_own_for_every_sample():
    coin = verifier("random", seed=1)
    flips = [coin(Sample(index=i)) for i in range(2000)]
    assert flips == [verifier("random", seed=1)(Sample(index=i)) for i in range(2000)]
    assert 900 < sum(flips) < 1100
    assert flips != [verifier("random", seed=2)(Sample(index=i)) for i in range(2000)]
    assert coin(Sample(index=0, response="a")) + coin(Sample(index=0, response="b")) in (0.0, 1.0, 2.0)
    assert {verifier("random", p=p)(Sample(index=i)) == p for p in (0.0, 1.0) for i in range(50)} == {True}


@pytest.mark.parametrize(
    ("rm_type", "options", "message"),
    [
        ("maths", {}, r"no verifier 'maths'\. Did you mean math\? Available: by_column, code, contains, dapo,"),
        ("boxed_exat", {}, r"no verifier 'boxed_exat'. Did you mean exact\?"),
        ("zzz", {}, r"no verifier 'zzz'\. Available: by_column, code, .*; each also with boxed_"),
        ("exact", {"sorce": "boxed"}, r"rm_options\.sorce: no option of exact; did you mean source\?"),
        ("math", {"x": 1}, r"no option of math \(it has: none\)"),
        ("exact", {"source": "box"}, r"rm_options\.source: 'box' is not a source; did you mean boxed\?"),
        ("exact", {"ignore_case": "yes"}, r"rm_options\.ignore_case: 'yes' has the wrong type"),
        ("regex", {"pattern": "("}, r"rm_options\.pattern: '\(' is not a regular expression"),
        ("random", {"p": 2.0}, "p: 2.0 must be from 0 to 1"),
    ],
)
def test_what_cannot_be_made_is_a_settings_error_that_names_the_way_out(rm_type, options, message):
    with pytest.raises(SettingsError, match=message):
        verifier(rm_type, **options)


@pytest.mark.parametrize("rm_type", ["exact", "contains", "numeric", "regex", "boxed_exact"])
def test_a_missing_label_is_a_record_error(rm_type):
    with pytest.raises(RecordError, match=r"sample 3: label: missing"):
        verifier(rm_type)(Sample(index=3, response=r"\boxed{5}"))


def test_a_label_of_the_wrong_kind_is_a_record_error():
    with pytest.raises(RecordError, match="has no number to compare with"):
        verifier("numeric")(Sample(response="5", label="five"))
    with pytest.raises(RecordError, match="not a regular expression"):
        verifier("regex")(Sample(response="5", label="("))


def test_extraction_by_hand():
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{a\}") is None
    assert (text_of(find_last_line("a\n b \n\n")), find_last_line("\n")) == ("b", None)
    assert (text_of(find_tagged("<answer>1</answer><answer>2")), find_tagged("</answer><answer>")) == ("1", None)


def test_numbers_by_hand():
    texts = ["1,234", "12,34", "1.", ".5", "-3/4", "3/0", "1e3", "1e301", "0.1\\overline{6}", "", "9" * 2000]
    values = [exact_number(text) for text in texts]
    assert [None if value is None else str(value) for value in values] == [
        "1234", None, "1", "1/2", "-3/4", None, "1000", None, "1/6", None, None,
    ]  # fmt: skip
    assert last_number("v2 costs 5.") == "5"


def test_the_last_number_is_the_same_wherever_it_stands():
    for text in ("5 or 6", "x-7", "1/2", "a 1,234.", "no", "−3", "9 " + "x" * 200, "8" * 150, "4/5 " + "y " * 90):
        for before in ("", "x" * 150 + " ", "1 2 3 ", "3 " * 90):
            padded = find_last_number(before + text)
            alone = last_number(text)
            expected = alone if alone is not None else last_number(before)
            assert (padded.text if padded else None) == expected
            assert padded is None or (before + text)[slice(*padded.span)] == padded.text


def test_importing_the_verifiers_loads_nothing_heavy():
    heavy = "{'sympy', 'math_verify', 'reasoning_gym', 'torch'}"
    load_all = "from slimectl.plugins.registry import VERIFIERS; [VERIFIERS.load(name) for name in VERIFIERS.parts]"
    code = f"import sys; {load_all}; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_the_manual_has_every_type_with_its_options():
    rows = [
        line
        for line in (Path(__file__).parents[2] / "docs" / "verifiers.md").read_text().splitlines()
        if line[:3] == "| `"
    ]
    named = {name: row for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert sorted(named) == known_types()
    for name, row in named.items():
        options = {field.name for field in fields(VERIFIERS.load(name))}
        assert set(re.findall(r"`(\w+)`", row.split("|")[-2])) == options, name


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("judge", {"unread": 0.5, "asks": 2, "per_s": 3.0, "tries": 5},
         {"default_score": 0.5, "max_attempts": 2, "max_requests_per_s": 3.0, "max_retries": 4}),
        ("remote_rm", {"tries": 1}, {"max_retries": 0}),  # the first request counted as a try
        ("repetition", {"of": "tokens"}, {"unit": "tokens"}),
        ("length_penalty", {"limit": 9, "free": 3}, {"limit": 9, "free_tokens": 3}),
        ("code", {"allow_weaker": True}, {"allow_unsandboxed_namespaces": True}),
    ],
)  # fmt: skip
def test_old_names_of_options_still_work(name: str, old: dict, new: dict):
    url = {"url": "http://h/v1"} if name in ("judge", "remote_rm") else {}
    assert verifier(name, **url, **old) == verifier(name, **url, **new)
    with pytest.raises(SettingsError, match=r"score.rm_options: \w+ and \w+ are the same option\. Give only \w+\."):
        verifier(name, **{**url, **old, **new})
