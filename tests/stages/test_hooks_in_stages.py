"""The user's own generate function: turns, tools, fan-outs and failures, through the commands."""

from __future__ import annotations

import json

import pytest
from workshop import Workshop

TWO_TURNS = """
TOOL = list(b" tool says 7 ")

async def generate(sample, sampling_params, generate):
    first = await generate(sample.tokens, sampling_params)
    sample.append_response_tokens(first.tokens, log_probs=first.log_probs, text=first.text)
    sample.append_response_tokens(TOOL, trainable=False, text=" tool says 7 ")
    second = await generate(sample.tokens, sampling_params)
    sample.append_response_tokens(second.tokens, log_probs=second.log_probs, text=second.text)
    sample.metadata["turns"] = [len(first.tokens), len(second.tokens)]
    return sample
"""
TOOL = list(b" tool says 7 ")

FAN_OUT = """
import copy

async def generate(sample, sampling_params, generate):
    made = []
    for _ in range(2):
        part = copy.deepcopy(sample)
        answer = await generate(part.tokens + [65 + len(made)], sampling_params)
        part.append_response_tokens([65 + len(made)], trainable=False)
        part.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
        made.append(part)
    return made
"""

SOME_FAIL = """
async def generate(sample, sampling_params, generate):
    answer = await generate(sample.tokens, sampling_params)
    if sample.index % 4 == 2:
        raise ConnectionError("the tool server is gone")
    sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
    return sample
"""

HOOK = ("-s", "rollout.custom_generate_function_path=generate.py:generate")


def with_hook(workshop: Workshop, text: str) -> Workshop:
    (workshop.folder / "generate.py").write_text(text)
    return workshop


def rolled_out(workshop: Workshop, *more: str, code: int = 0) -> list[dict]:
    out = workshop.slimectl("rollout", "-c", "slimectl.toml", *HOOK, *more, code=code)
    (workshop.folder / "samples.jsonl").write_bytes(out)
    return [json.loads(line) for line in out.splitlines()]


def trained(workshop: Workshop, *more: str) -> list[dict]:
    """Score and train what was rolled out; the reports."""
    workshop.slimectl("score", "samples.jsonl", "-c", "slimectl.toml", "--out", "scored.jsonl")
    out = workshop.slimectl("train", "scored.jsonl", "-c", "slimectl.toml", *more)
    return [json.loads(line) for line in out.splitlines()]


def test_what_a_tool_wrote_is_masked_and_the_rest_is_trained_on(workshop: Workshop):
    samples = rolled_out(with_hook(workshop, TWO_TURNS))
    assert len(samples) == 32
    for sample in samples:
        first, second = sample["metadata"]["turns"]
        assert sample["response_length"] == first + len(TOOL) + second
        assert sample["loss_mask"] == [1] * first + [0] * len(TOOL) + [1] * second
        response = sample["tokens"][-sample["response_length"] :]
        assert response[first : first + len(TOOL)] == TOOL
        log_probs = sample["rollout_log_probs"]
        assert log_probs[first : first + len(TOOL)] == [0.0] * len(TOOL)
        assert all(value < 0 for value in log_probs[:first] + log_probs[first + len(TOOL) :])
        assert " tool says 7 " in sample["response"]
        assert sample["status"] == "completed"
        assert sample["weight_versions"] == ["0", "0"]
    reports = trained(workshop, "--save", "better", "-s", "run.rollout_batch_size=8")
    assert len(reports) == 1
    metrics = reports[0]["metrics"]
    assert metrics["train/grad_norm"] > 0
    # Two turns of an engine that is the trainer's model: its log-probabilities are the trainer's, tool text included.
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(0, abs=1e-5)
    written = [p for s in samples for p, bit in zip(s["rollout_log_probs"], s["loss_mask"], strict=True) if bit]
    assert metrics["rollout/rollout_log_probs"] == pytest.approx(sum(written) / len(written))


def test_the_samples_of_a_fan_out_are_one_execution(workshop: Workshop):
    samples = rolled_out(with_hook(workshop, FAN_OUT), "-s", "rollout.data=prompts.jsonl@[0:4]")
    assert len(samples) == 32
    for i in range(0, 32, 2):
        one, other = samples[i : i + 2]
        assert one["rollout_id"] == other["rollout_id"] == i // 2
        assert one["group_index"] == other["group_index"] == i // 8
        response = one["tokens"][-one["response_length"] :]
        assert (response[0], one["loss_mask"][0]) == (65, 0)
        assert one["tokens"] != other["tokens"]
    # Both count as one rollout: 4 prompts of 4 attempts, 2 samples each.
    reports = trained(workshop, "-s", "run.rollout_batch_size=8")
    assert [report["metrics"]["train/global_batch_size"] for report in reports] == [16]


def test_a_round_of_a_run_is_whole_whatever_fans_out(workshop: Workshop):
    with_hook(workshop, FAN_OUT)
    workshop.slimectl("run", *HOOK, "-s", "run.num_rollout=2")
    steps = [line for line in workshop.metrics("a") if "train/step" in line["metrics"]]
    assert [line["rollout_id"] for line in steps] == [1, 2]
    assert {line["metrics"]["train/global_batch_size"] for line in steps} == {16}
    assert {line["metrics"]["rollout/staleness/max"] for line in steps} == {0}


@pytest.mark.slow
def test_a_failing_attempt_is_reported_and_not_trained_on(workshop: Workshop):
    samples = rolled_out(with_hook(workshop, SOME_FAIL))
    failed = [sample for sample in samples if sample["status"] == "failed"]
    assert [sample["index"] for sample in failed] == list(range(2, 32, 4))
    assert {sample["metadata"]["error"] for sample in failed} == {
        "ConnectionError: the tool server is gone (generate.py:5)"
    }
    assert all(sample["remove_sample"] and sample["response_length"] == 0 for sample in failed)
    assert "32 samples" in workshop.stderr
    cause = "failed, the first with ConnectionError: the tool server is gone (generate.py:5)"
    assert f"8 of 32 attempts {cause}" in workshop.stderr
    assert workshop.stderr.count("\nattempt ") + workshop.stderr.startswith("attempt ") == 1  # of 8 failures the first
    metrics = trained(workshop, "-s", "run.rollout_batch_size=8")[0]["metrics"]
    assert metrics["rollout/error/ConnectionError"] == 8
    assert metrics["train/global_batch_size"] == 24
    # The same step as if they had never been there.
    lines = (workshop.folder / "scored.jsonl").read_text().splitlines(keepends=True)
    (workshop.folder / "whole.jsonl").write_text(
        "".join(line for line in lines if json.loads(line)["status"] != "failed")
    )
    without = json.loads(workshop.slimectl("train", "whole.jsonl", "-c", "slimectl.toml",
                                           "-s", "run.rollout_batch_size=6"))  # fmt: skip
    assert without["metrics"]["train/global_batch_size"] == 24
    for name in ("train/loss", "train/grad_norm"):
        assert without["metrics"][name] == pytest.approx(metrics[name], rel=1e-6), name


def test_a_function_that_is_not_async_fails_alone_too(workshop: Workshop):
    samples = rolled_out(with_hook(workshop, "def generate(sample): raise OSError('no route')"), code=1)
    errors = {(sample["status"], sample["metadata"]["error"]) for sample in samples}
    assert errors == {("failed", "OSError: no route (generate.py:1)")}


FIX = "Fix rollout.custom_generate_function_path = 'generate.py:generate'."


@pytest.mark.parametrize(
    ("failing", "limit", "error"),
    [
        ("True", "1", f"32 of 32 attempts failed. {FIX}"),
        ("sample.index % 4 == 2", "0.25", ""),
        ("sample.index % 4 == 2", "0.2", f"8 of 32 attempts failed. This is more than rollout.max_failed = 0.2. {FIX}"),
    ],
)
def test_too_many_failed_attempts_are_an_error_that_names_the_setting(
    workshop: Workshop, failing: str, limit: str, error: str
):
    with_hook(workshop, SOME_FAIL.replace("sample.index % 4 == 2", failing))
    samples = rolled_out(workshop, "-s", f"rollout.max_failed={limit}", code=1 if error else 0)
    assert len(samples) == 32
    last = workshop.stderr.splitlines()[-1]
    assert last == f"slimectl: {error}" if error else "8 of 32 attempts failed, the first with Conn" in last
    shown = workshop.slimectl("inspect", "samples.jsonl", "--where", "status == 'failed'", "--rows", "1").decode()
    assert "\nfailed: ConnectionError: the tool server is gone (generate.py:5)\n" in shown


def test_an_evaluation_whose_attempts_all_fail_is_an_error(workshop: Workshop):
    with_hook(workshop, "def generate(sample): raise OSError('no route')")
    workshop.slimectl("eval", "-c", "slimectl.toml", *HOOK, code=1)
    assert "small: 3 of 3 attempts failed, the first with OSError: no route (generate.py:1). Fix" in workshop.stderr


def test_a_run_survives_groups_of_which_one_answer_is_left(workshop: Workshop):
    with_hook(workshop, SOME_FAIL.replace("sample.index % 4 == 2", "sample.index % 4 != 2"))
    workshop.slimectl("run", *HOOK, "-s", "run.num_rollout=1", "-s", "eval.before_train=false")
    metrics = next(line["metrics"] for line in workshop.metrics("a") if "train/step" in line["metrics"])
    assert metrics["rollout/error/ConnectionError"] == 12
    assert metrics["train/grad_norm"] == 0.0  # nothing to compare


@pytest.mark.parametrize(
    ("body", "type_name"), [("return 'an answer'", "str"), ("return None", "NoneType"), ("return []", "list")]
)
def test_something_else_than_samples_is_refused_in_one_line(workshop: Workshop, body: str, type_name: str):
    with_hook(workshop, f"async def generate(sample):\n    {body}\n")
    workshop.slimectl("rollout", "-c", "slimectl.toml", *HOOK, code=2)
    assert workshop.stderr == (
        f"slimectl: rollout.custom_generate_function_path: generate.py:generate returned {type_name}. "
        "Return the Sample or a list of them.\n"
    )


def test_a_generate_function_of_the_wrong_shape_is_refused_before_anything_is_sampled(workshop: Workshop):
    with_hook(workshop, "async def generate(sample, engine_url):\n    return sample\n")
    assert workshop.slimectl("rollout", "-c", "slimectl.toml", *HOOK, code=2) == b""
    assert (
        "asks for engine_url. Functions of this setting can ask for args, settings, sample, sampling_params, generate"
        in workshop.stderr
    )


def test_settings_and_the_evaluation_flag_are_on_offer(workshop: Workshop):
    text = """
async def generate(args, sample, sampling_params, evaluation, generate):
    answer = await generate(sample.tokens, sampling_params)
    sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
    sample.metadata |= {"evaluation": evaluation, "asked": args.rollout_max_response_len}
    return sample
"""
    assert {json.dumps(s["metadata"]) for s in rolled_out(with_hook(workshop, text))} == {
        '{"evaluation": false, "asked": 12}'
    }
    workshop.slimectl("eval", "-c", "slimectl.toml", *HOOK, "--out", "graded.jsonl")
    graded = [json.loads(line) for line in (workshop.folder / "graded.jsonl").read_text().splitlines()]
    assert {sample["metadata"]["evaluation"] for sample in graded} == {True}
