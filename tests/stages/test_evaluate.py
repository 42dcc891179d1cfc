"""Evaluations: whose settings hold for a dataset, and what several answers to a prompt say together."""

from __future__ import annotations

import json

import pytest
from workshop import Workshop

from slimectl.cli.evaluate import summary_line, table
from slimectl.errors import RecordError, SettingsError
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.settings.run import TrackSettings
from slimectl.stages.evaluate import AnswerExtractor, resolve_dataset_settings, summarize, table_of
from slimectl.stages.score import Grader
from slimectl.types import Sample, Status


def settings(*assignments: str):
    return resolve([from_assignments(assignments)]).settings


def sample(index: int, reward: object, *, group: int = 0, response: str = "", **facts: object) -> Sample:
    return Sample(group_index=group, index=index, tokens=[9, 1, 2], response_length=2, response=response,
                  reward=reward, status=Status.COMPLETED, **facts)  # fmt: skip


def test_a_datasets_own_settings_go_before_those_of_eval_and_these_before_the_others():
    given = settings(
        "rollout.input_key=question", "rollout.label_key=answer", "rollout.min_new_tokens=3",
        "score.rm_type=exact", "eval.temperature=0.5", "eval.n_samples_per_prompt=2", "eval.min_new_tokens=2",
        'eval.data.a={path = "a.jsonl", n_samples_per_prompt = 8, label_key = "gold", rm_type = "math"}',
        "eval.data.b=b.jsonl",
    )  # fmt: skip
    a, b = resolve_dataset_settings(given, "a"), resolve_dataset_settings(given, "b")
    assert (a.eval.n_samples_per_prompt, a.eval.temperature) == (8, 0.5)
    assert (a.rollout.label_key, a.rollout.input_key, a.rollout.min_new_tokens) == ("gold", "question", 2)
    assert a.score.rm_type == "math"
    assert (b.eval.n_samples_per_prompt, b.rollout.label_key, b.score.rm_type) == (2, "answer", "exact")


def test_a_verifier_of_its_own_goes_before_the_users_function():
    given = settings("score.custom_rm_path=mine.py:reward", 'eval.data.a={path = "a.jsonl", rm_type = "math"}')
    assert resolve_dataset_settings(given, "a").score.custom_rm_path is None
    assert resolve_dataset_settings(given, "other").score.custom_rm_path == "mine.py:reward"
    both = settings("eval.rm_type=exact", 'eval.data.a={path = "a.jsonl", custom_rm_path = "other.py:reward"}')
    assert resolve_dataset_settings(both, "a").score.custom_rm_path == "other.py:reward"
    assert resolve_dataset_settings(both, "b").score.rm_type == "exact"


def test_the_most_frequent_answer_stands_for_a_prompt():
    grader = Grader(settings("score.rm_type=math"))
    said = [["7", "7", "3"], ["4", "5", "5"]]  # of three answers each the most frequent is right, and wrong
    labels = ["7", "4"]
    samples = [
        sample(3 * g + i, float(said[g][i] == labels[g]), group=g, label=labels[g], response=rf"\boxed{{{said[g][i]}}}")
        for g in range(2)
        for i in range(3)
    ]
    found = summarize("m", samples, answer=AnswerExtractor(grader))
    assert found["eval/m-maj@3"] == 0.5
    assert found["eval/m-avg@3"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert found["eval/m-pass@2"] == pytest.approx((1 + 2 / 3) / 2)  # 1 - C(1,2)/C(3,2), 1 - C(2,2)/C(3,2)
    assert found["eval/m"] == found["eval/m_avg_reward"] == 0.5
    assert found["eval/m_samples"] == 6.0


@pytest.mark.parametrize(
    ("rm_type", "label", "form", "answers", "right"),
    [
        ("math", "1/2", r"\boxed{{{}}}", ["1/2", "3", "0.5", "3", r"\frac12"], [1, 0, 1, 0, 1]),
        ("boxed_numeric", "0.5", r"\boxed{{{}}}", ["1/2", "3", "0.5", "3", ".5"], [1, 0, 1, 0, 1]),
        ("dapo", "42", "Answer: {}", ["42", "3", "42.0", "3", "042"], [1, 0, 1, 0, 1]),
        ("gpqa", "B", "The answer is {}", ["B", "C", "Rome", "C", "(b)"], [1, 0, 1, 0, 1]),
        ("exact", "a", "{}", ["a", "b", "A", "b", "A "], [1, 0, 0, 0, 0]),
    ],
)
def test_answers_that_the_verifier_holds_equal_vote_together(
    rm_type: str, label: str, form: str, answers: list[str], right: list[int]
):
    grader = Grader(settings(f"score.rm_type={rm_type}"))
    metadata = {"choices": ["Paris", "Rome", "Oslo"]}
    samples = [
        sample(i, float(right[i]), label=label, response=form.format(text), metadata=metadata)
        for i, text in enumerate(answers)
    ]
    expected = 0.0 if rm_type == "exact" else 1.0
    assert summarize("m", samples, answer=AnswerExtractor(grader))["eval/m-maj@5"] == expected


def test_the_answer_may_come_with_the_reward_and_without_any_there_is_no_vote():
    samples = [sample(i, {"score": 1.0, "pred": "7"}) for i in range(2)]
    assert summarize("m", samples, answer=AnswerExtractor(lambda sample: 1.0))["eval/m-maj@2"] == 1.0
    plain = [sample(i, 1.0) for i in range(2)]
    assert not [name for name in summarize("m", plain, answer=AnswerExtractor(lambda s: 1.0)) if "maj@" in name]


def test_a_reward_without_an_answer_is_no_vote():
    """Three answers of six were not found: of the three votes two are for 7, which is right."""
    said = [None, None, None, "7", "7", "3"]
    samples = [sample(i, {"score": float(text == "7"), "pred": text}) for i, text in enumerate(said)]
    assert summarize("m", samples, answer=AnswerExtractor(lambda sample: 1.0))["eval/m-maj@6"] == 1.0
    silent = [sample(i, {"score": 1.0, "pred": None}) for i in range(2)]
    found = summarize("m", [*silent, *(sample(i, {"score": 1.0, "pred": "7"}, group=1) for i in range(2))],
                      answer=AnswerExtractor(lambda sample: 1.0))  # fmt: skip
    assert found["eval/m-maj@2"] == 0.5  # 0 without a vote, and 1


def test_samples_without_a_reward_are_counted_and_left_out():
    silent = sample(2, None, metadata={"no_reward": "returned None"})
    found = summarize("m", [sample(0, 1.0), sample(1, 0.0), silent])
    left = summarize("m", [sample(0, 1.0), sample(1, 0.0)])
    assert found == left | {"eval/m/no_reward": 1.0}
    assert summary_line("m", found) == "m: accuracy 0.500, 1 skipped without a reward"
    assert [row["reward"] for row in table_of([sample(0, 1.0), silent], 2)] == [1.0]
    with pytest.raises(RecordError, match=r"eval\.data\.m: no sample has a reward, because every reward function"):
        summarize("m", [silent])


def test_one_answer_a_prompt_has_no_pass_rates():
    found = summarize("m", [sample(0, 1.0), sample(1, 0.0, group=1)])
    assert not [name for name in found if "@" in name]
    assert (found["eval/m_max_reward"], found["eval/m_min_reward"]) == (1.0, 0.0)


def test_the_branches_of_an_attempt_count_once():
    """Two attempts at a prompt, the first of three branches: a half of the answers is right, not three quarters."""
    branches = [sample(0, 1.0, rollout_id=0, response="1 2 3") for _ in range(3)]
    metrics = summarize("m", [*branches, sample(1, 0.0), sample(2, 1.0, group=1), sample(3, 1.0, group=1)])
    plain = summarize("m", [sample(0, 1.0), sample(1, 0.0), sample(2, 1.0, group=1), sample(3, 1.0, group=1)])
    assert {name: value for name, value in metrics.items() if "len" not in name} == {
        name: value for name, value in plain.items() if "len" not in name
    }
    assert (metrics["eval/m_samples"], metrics["eval/m_accuracy"], metrics["eval/m-avg@2"]) == (4, 0.75, 0.75)
    assert metrics["eval/m/response_len/max"] == 3 * plain["eval/m/response_len/max"]
    half_right = [sample(0, reward, rollout_id=0) for reward in (1.0, 0.0)]
    assert summarize("m", half_right)["eval/m"] == 0.5


def test_standard_errors_count_every_prompt_once():
    found = summarize("m", [sample(0, 1.0), sample(1, 0.5), sample(2, 0.0, group=1), sample(3, 0.0, group=1)])
    # The prompts' means are 0.5 and 0 (accuracy), 0.75 and 0 (reward); their deviations over sqrt(2) prompts.
    assert found["eval/m_accuracy_stderr"] == pytest.approx(0.25)
    assert found["eval/m_avg_reward_stderr"] == pytest.approx(0.375)
    assert "eval/m_accuracy_stderr" not in summarize("m", [sample(0, 1.0), sample(1, 0.0)])
    assert summary_line("m", found) == "m: accuracy 0.250, mean reward 0.375"


def test_a_terminal_gets_a_table_with_standard_errors():
    one = summarize("aime", [sample(0, 1.0), sample(1, 0.5), sample(2, 0.0, group=1), sample(3, 0.0, group=1)])
    other = summarize("short", [sample(0, 1.0)])
    assert list(table(["aime", "short"], one | other)) == [
        "dataset  responses       accuracy    mean reward  avg@2  pass@1  pass@2  length  truncated",
        "aime             4  0.250 ± 0.250  0.375 ± 0.375  0.250   0.250   0.500       2         0%",
        "short            1          1.000          1.000      -       -       -       2         0%",
    ]


def test_track_asks_for_more_of_evaluations_too():
    track = TrackSettings(log_correct_samples=True, log_multi_turn=True, log_reward_category="topic")
    found = summarize("m", [sample(0, 1.0, metadata={"topic": "sums"}), sample(1, 0.0)], track=track)
    assert found["eval/m/correct_samples/count"] == 1.0
    assert found["eval/m/multi_turn/round_number/max"] == 1.0
    assert found["eval/m/category/sums/reward"] == 1.0


def test_the_table_has_a_sample_of_each_prompt_before_a_second_of_any():
    samples = [sample(i, {"score": i / 4}, group=i // 2, response=f"r{i}", prompt=f"p{i // 2}") for i in range(5)]
    samples[4].prompt, samples[4].label = [{"role": "user", "content": "é"}], 7
    assert table_of(samples, 2) == [
        {"prompt": "p0", "response": "r0", "label": "", "reward": 0.0},
        {"prompt": "p1", "response": "r2", "label": "", "reward": 0.5},
    ]
    last = {"prompt": '[{"role": "user", "content": "é"}]', "response": "r4", "label": "7", "reward": 1.0}
    assert table_of(samples, 3)[2] == last
    assert [row["response"] for row in table_of(samples, 9)] == ["r0", "r2", "r4", "r1", "r3"]


def test_several_answers_that_would_be_alike_are_refused():
    greedy = ["eval.data.a=a.jsonl", "eval.temperature=0", "eval.n_samples_per_prompt=4"]
    with pytest.raises(
        SettingsError, match=r"eval\.data\.a: at temperature 0, all 4 responses to a prompt are the same"
    ):
        settings(*greedy)
    with pytest.raises(SettingsError, match=r"eval\.data\.b: at temperature 0, all 2"):
        settings('eval.data.b={path = "b.jsonl", temperature = 0, n_samples_per_prompt = 2}')
    settings('eval.data.b={path = "b.jsonl", temperature = 0}')
    settings(*greedy, "rollout.custom_generate_function_path=tools.py:generate")


def test_attempts_that_failed_are_counted_and_count_as_wrong():
    failed = sample(1, 0.0, metadata={"error": "ConnectionError: gone"})
    failed.status = Status.FAILED
    found = summarize("m", [sample(0, 1.0), failed])
    assert (found["eval/m/error/ConnectionError"], found["eval/m_accuracy"]) == (1.0, 0.5)
    assert summary_line("m", found) == "m: accuracy 0.500, 1 failed (ConnectionError)"


def test_a_dataset_without_prompts_is_named():
    with pytest.raises(RecordError, match=r"eval\.data\.m: no prompts"):
        summarize("m", [])


def test_trackers_of_a_run_get_a_table_of_samples(workshop: Workshop):
    options = ["run.num_rollout=1", 'track.with=["jsonl", "stdout"]', "track.samples=3"]
    workshop.slimectl("run", *[word for each in options for word in ("-s", each)])
    lines = (workshop.folder / "runs" / "a" / "tracked.jsonl").read_text().splitlines()
    tables = [line for line in map(json.loads, lines) if "table" in line]
    assert [(line["step"], line["table"], len(line["rows"])) for line in tables] == [
        (0, "eval/small/samples", 3), (1, "eval/small/samples", 3),
    ]  # fmt: skip
    assert [row["prompt"] for row in tables[0]["rows"]] == ["say one", "say two", "say three"]
    assert workshop.stderr.count("'say two'  ") == 2


def test_a_name_that_is_given_twice_is_refused(workshop: Workshop):
    workshop.slimectl("eval", "--data", "a=prompts.jsonl", "--data", "a=other.jsonl", code=2)
    assert "--data a=other.jsonl: a is already prompts.jsonl" in workshop.stderr


CONFIG = """
defaults:
  n_samples_per_eval_prompt: 1
  max_response_len: 4
datasets:
  - {name: short, path: "prompts.jsonl@[0:2]", max_response_len: 2, n_samples_per_eval_prompt: 4}
  - {name: long, path: "prompts.jsonl@[0:3]", custom_rm_path: "ones.py:reward"}
"""


def test_eval_takes_datasets_from_a_file_each_with_its_settings(workshop: Workshop):
    (workshop.folder / "eval.yaml").write_text(CONFIG)
    (workshop.folder / "ones.py").write_text("def reward(sample):\n    return 1.0\n")
    out = workshop.slimectl("eval", "-c", "slimectl.toml", "--eval-config", "eval.yaml", "--out", "graded.jsonl")
    found = json.loads(out)
    assert (found["eval/short_samples"], found["eval/long_samples"]) == (8.0, 3.0)
    assert found["eval/short/response_len/max"] <= 2 < found["eval/long/response_len/max"] <= 4
    assert found["eval/long_accuracy"] == 1.0
    assert "eval/short-pass@4" in found
    lines = [json.loads(line) for line in (workshop.folder / "graded.jsonl").read_text().splitlines()]
    assert [line["metadata"]["dataset"] for line in lines] == ["small"] * 3 + ["short"] * 8 + ["long"] * 3


BEST = """
def best(samples):
    assert len({sample.group_index for sample in samples}) == 1
    most = max(samples, key=lambda sample: sample.tokens)
    return [{"best": float(sample is most), "of": len(samples)} for sample in samples]
"""


def test_an_evaluation_may_grade_the_answers_to_a_prompt_together(workshop: Workshop):
    (workshop.folder / "together.py").write_text(BEST)
    given = ["score.custom_rm_path=together.py:best", "score.group_rm=true", "score.reward_key=best",
             "eval.n_samples_per_prompt=3", "eval.temperature=1.0", "eval.max_response_len=4"]  # fmt: skip
    assignments = [word for one in given for word in ("-s", one)]
    data = ("--data", "m=prompts.jsonl@[0:4]")
    found = json.loads(workshop.slimectl("eval", "-c", "slimectl.toml", *data, *assignments, "--out", "graded.jsonl"))
    lines = [json.loads(line) for line in (workshop.folder / "graded.jsonl").read_text().splitlines()]
    graded = [line["reward"] for line in lines if line["metadata"]["dataset"] == "m"]
    assert [reward["of"] for reward in graded] == [3] * 12
    assert [sum(reward["best"] for reward in graded[at : at + 3]) for at in range(0, 12, 3)] == [1.0] * 4
    assert found["eval/m_accuracy"] == pytest.approx(1 / 3)
    assert (found["eval/m-pass@1"], found["eval/m-pass@2"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
