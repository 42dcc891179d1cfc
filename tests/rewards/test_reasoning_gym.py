import json
import sys

import pytest

from slimectl.errors import MissingExtraError, RecordError
from slimectl.rewards import verifier
from slimectl.rewards.reasoning_gym import _scorer, is_safe_to_eval
from slimectl.types import Sample

reasoning_gym = pytest.importorskip("reasoning_gym")


def made(task, answer=None, **config):
    """A sample whose entry went through JSON, as it does on disk; answered rightly where no answer is given."""
    entry = reasoning_gym.create_dataset(task, seed=1, size=1, **config)[0]
    response = f"Well. <answer>{entry['answer'] if answer is None else answer}</answer>"
    metadata = {"source_dataset": task, "entry": json.loads(json.dumps(entry))}
    return Sample(prompt=entry["question"], label=str(entry["answer"]), response=response, metadata=metadata)


EVALUATING = ["countdown", "polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion"]


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "leg_counting", "gcd", "rearc", *EVALUATING])
def test_the_tasks_own_answer_scores_one(task):
    assert verifier("reasoning_gym")(made(task)) == 1.0


@pytest.mark.parametrize("task", ["simple_integration", "intermediate_integration"])
def test_the_question_written_as_an_integral_earns_nothing(task):
    metadata = made(task).metadata["entry"]["metadata"]
    question = f"{metadata['integrand']}, {metadata['variable']}"
    for answer in (
        f"Integral({question})",
        f"Integral({question}) + C",
        f"integrate({question})",
        f"0 + Integral ({question})",
    ):
        assert verifier("reasoning_gym")(made(task, answer=answer)) == 0.0


def test_a_wrong_answer_scores_what_the_task_says():
    assert verifier("reasoning_gym")(made("chain_sum", answer="no idea")) < 0.1
    assert verifier("reasoning_gym")(made("countdown", answer="1 + 1")) == 0.05


def test_a_literal_gets_the_partial_score_of_its_scorer():
    sample = made("spiral_matrix")
    sample.response = str([int(number) for number in sample.label.split()])
    assert verifier("reasoning_gym")(sample) == 0.1


def test_without_a_tag_the_whole_response_is_the_answer():
    sample = made("chain_sum")
    sample.response = f" {sample.label}\n"
    assert verifier("reasoning_gym").extract(sample) == sample.label
    assert verifier("reasoning_gym")(sample) == 1.0


def test_an_entry_is_made_of_prompt_label_and_metadata_where_there_is_none():
    sample = made("chain_sum")
    sample.metadata = sample.metadata["entry"]["metadata"]
    assert verifier("reasoning_gym")(sample) == 1.0


@pytest.mark.parametrize("task", EVALUATING)
def test_no_answer_is_executed(task, tmp_path):
    for code in (
        "open('{0}/x', 'w')",
        "[open('{0}/x', 'w')]",
        "[1 #\n, open('{0}/x', 'w')]",
        'sin(\'open("{0}/x", "w")\')',
    ):
        assert verifier("reasoning_gym")(made(task, answer=code.format(tmp_path))) == 0.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "inert"),
    [
        ("(3 + 4)*x**2 - x/7", True),
        ("2*exp(3*x) + C", True),
        ("[['Q', '_'], ['_', 'Q']]", True),
        ("1 2 3\n4 5 6", True),
        ('{"a": [1, 2]}', True),
        ("__import__('os')", False),
        ("open('x', 'w')", False),
        ("Integral(2*x, x)", False),
        ("Integral(2*x, x) + C", False),
        ("integrate(2*x, x)", False),
        ("2*Integral (x, (x, 0, x))", False),
        ("eval(1)", False),
        ("sin('1')", False),
        ("exp(exp(9))", False),
        ("x.__class__", False),
        ("().__class__", False),
        ("[x for x in [1]]", False),
        ("lambda: 1", False),
        ("f'{1}'", False),
        ("9**9**9", False),
        ("(9**64)**64", False),
        ("9**(8*8*8)", False),
        ("[0]*10**9", False),
        ("'a'*10**9", False),
        ("5!", False),
        ("1 +", True),
        ("1+" * 5000, False),
    ],
)
def test_only_literals_and_small_arithmetic_are_inert(text, inert):
    assert is_safe_to_eval(text) is inert


@pytest.mark.parametrize("number", ["1e999999999", "1E-999999999", "5.e99_999_999", "1e99,999,999", "-.1e999999999/3"])
@pytest.mark.parametrize("task", ["coin_flip", "power_function", "chain_sum", *EVALUATING])
def test_no_number_is_written_out(task, number):
    verdict = verifier("reasoning_gym").explain(made(task, answer=number))
    assert (verdict.reward, verdict.why[:38]) == (0.0, "an exponent of more than three digits,")


NOT_FINITE = ["nan", "NaN", "-nan", "+nan", "nan, 1", "NaN ± 1", "(nan, nan)", "nanj", "1+nanj", "snan", "nan123",
              "inf", "-inf", "Infinity", "$\\infty$", "∞", "[[nan]]", "nan/1", "inf - inf"]  # fmt: skip


@pytest.mark.slow
def test_no_number_that_is_none_earns_anything_in_any_task():
    from reasoning_gym.factory import DATASETS

    earned = {}
    for task in sorted(set(DATASETS) - {"composite"}):  # which is made of the others
        entry = json.loads(json.dumps(reasoning_gym.create_dataset(task, seed=1, size=1)[0], default=str))
        for answer in NOT_FINITE:
            sample = Sample(prompt=entry["question"], label=str(entry["answer"]), response=f"<answer>{answer}</answer>",
                            metadata={"source_dataset": task, "entry": entry})  # fmt: skip
            verdict = verifier("reasoning_gym").explain(sample)
            if verdict.reward:
                earned[task, answer] = verdict
    assert earned == {}


def test_a_label_that_spells_like_no_number_is_still_right():
    entry = {"question": "Spell nan backward", "answer": "nan", "metadata": {"word": "nan"}}
    sample = Sample(prompt=entry["question"], label="nan", response="<answer>nan</answer>",
                    metadata={"source_dataset": "spell_backward", "entry": entry})  # fmt: skip
    assert verifier("reasoning_gym")(sample) == 1.0


def test_a_score_that_is_no_number_is_none(monkeypatch):
    scorer = _scorer("chain_sum")._replace(score=lambda answer, entry: float("nan"))
    monkeypatch.setattr("slimectl.rewards.reasoning_gym._scorer", lambda task: scorer)
    verdict = verifier("reasoning_gym").explain(made("chain_sum", answer="5"))
    assert (verdict.reward, verdict.why[:32]) == (0.0, "the scorer of chain_sum gives na")


def test_a_scorer_that_warns_writes_nothing(recwarn):
    assert verifier("reasoning_gym")(made("pool_matrix", answer="")) < 0.1
    assert not is_safe_to_eval("1or [x]()")
    assert list(recwarn) == []


def test_metadata_that_names_no_task_is_a_record_error():
    with pytest.raises(RecordError, match=r"metadata\.source_dataset: missing"):
        verifier("reasoning_gym")(Sample(response="5"))
    chain_sum = {"source_dataset": "chain_sum"}
    with pytest.raises(RecordError, match=r"label: missing, and metadata\.entry is missing"):
        verifier("reasoning_gym")(Sample(response="None", metadata=chain_sum))
    assert verifier("reasoning_gym")(Sample(response="5", label=5.0, metadata=chain_sum)) == 1.0  # 5, of a float column
    with pytest.raises(RecordError, match="'no_such' is not a reasoning-gym task"):
        verifier("reasoning_gym")(Sample(response="5", metadata={"source_dataset": "no_such"}))


def test_a_missing_package_names_the_extra(monkeypatch):
    _scorer.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'slimectl\[quickstart\]'"):
        verifier("reasoning_gym")(Sample(response="5", metadata={"source_dataset": "chain_sum"}))
