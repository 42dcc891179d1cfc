"""Rewards of other programs run unchanged: the parts of samples come by the names that they have there."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import HookError
from slimectl.hooks.reward import UserReward
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.stages.filters import leave_out_truncated
from slimectl.types import Sample, Status

OWN = '''
def trl(prompts, completions, **kwargs):
    """As TRL's GRPOTrainer calls it: lists, and the columns of the data set."""
    return [float(str(len(prompt)) in completion) + 0.5 * (level == "hard")
            for prompt, completion, level in zip(prompts, completions, kwargs["level"])]

def trl_chat(completions, answer, **kwargs):
    return [float(completion[0]["content"] == word) for completion, word in zip(completions, answer, strict=True)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl calls it."""
    assert data_source == "sums" and extra_info["index"] in (3, 4)
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}

def batch(data_sources, solution_strs, ground_truths, extra_infos, scale, bonus=0.0, **kwargs):
    """As verl's batch manager calls it, with two reward_kwargs."""
    assert data_sources == ["sums"] * len(solution_strs) and [info["index"] for info in extra_infos] == [3, 4]
    return [scale * (text == truth) + bonus for text, truth in zip(solution_strs, ground_truths, strict=True)]

def scaled(solution_str, ground_truth, scale=1.0, **kwargs):
    return scale * (solution_str == ground_truth) + kwargs["bonus"]

async def by_parts(prompt, response, label, question, level="easy"):
    assert prompt == question
    return float(response == label) + (level == "hard")

def of_no_row(response, hardness):
    return hardness

def openrlhf(queries, prompts, labels, **kwargs):
    """As OpenRLHF calls it."""
    import torch
    correct = [float(query[len(prompt):] == label) for query, prompt, label in zip(queries, prompts, labels)]
    return {"rewards": torch.tensor(correct), "scores": torch.tensor(correct), "extra_logs": {"length": len(queries)}}

def openrlhf_list(queries, prompts, labels):
    return [len(query) + 10.0 * len(prompt) for query, prompt in zip(queries, prompts)]

def misspelt(sampel):
    return 0.0
'''
SAMPLES = [
    Sample(index=i, prompt="ab", response=response, label="2", metadata={"data_source": "sums", "index": 3 + i},
           extra={"level": level})
    for i, (response, level) in enumerate([("2", "hard"), ("3", "easy")])
]  # fmt: skip


def rewards(tmp_path: Path, name: str, samples: list[Sample], *assignments: str) -> list[Any]:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    reward = UserReward(f"{file}:{name}", resolve([from_assignments(assignments)]).settings)
    calls = [samples] if reward.takes_many else [[sample] for sample in samples]

    def graded(call: list[Sample]) -> list[Any]:
        result = reward.called(call)
        return reward.rewards(asyncio.run(result) if inspect.isawaitable(result) else result, call)

    return [number for call in calls for number in graded(call)]


def test_a_reward_of_trl_gets_lists_and_the_columns_of_the_rows(tmp_path: Path) -> None:
    assert rewards(tmp_path, "trl", SAMPLES, "score.group_rm=true") == [1.5, 0.0]
    chats = [Sample(prompt=[{"role": "user", "content": "?"}], response=word, label="2") for word in "23"]
    assert rewards(tmp_path, "trl_chat", chats) == [1.0, 0.0]


def test_a_reward_of_openrlhf_gets_queries_prompts_and_labels(tmp_path: Path) -> None:
    assert rewards(tmp_path, "openrlhf", SAMPLES) == [1.0, 0.0]
    assert rewards(tmp_path, "openrlhf_list", SAMPLES) == [23.0, 23.0]  # "ab2" and "ab", so 3 + 10 * 2


def test_a_query_of_a_chat_needs_its_tokens(tmp_path: Path) -> None:
    chat = [Sample(prompt=[{"role": "user", "content": "?"}], response="2", label="2")]
    with pytest.raises(HookError, match=r"Set model\.path"):
        rewards(tmp_path, "openrlhf", chat)


def test_a_reward_of_verl_gets_its_four_parts(tmp_path: Path) -> None:
    assert rewards(tmp_path, "compute_score", SAMPLES) == [{"score": 1.0, "acc": 1.0}, {"score": 0.0, "acc": 0.0}]
    row = {"data_source": "sums", "extra_info": {"index": 4}, "completion": "3", "solution_str": "3"}
    rows = [Sample(response="2", label="2", extra=row)]
    assert rewards(tmp_path, "compute_score", rows) == [{"score": 1.0, "acc": 1.0}]


def test_a_function_of_verls_batch_manager_gets_lists_of_these_parts(tmp_path: Path) -> None:
    settings = ("score.group_rm=true", "custom.scale=2.0", "custom.bonus=0.5")
    assert rewards(tmp_path, "batch", SAMPLES, *settings) == [2.5, 0.5]


def test_values_of_custom_are_arguments_that_no_row_has(tmp_path: Path) -> None:
    assert rewards(tmp_path, "scaled", SAMPLES, "custom.scale=3.0", "custom.bonus=0.25") == [3.25, 0.25]
    assert rewards(tmp_path, "of_no_row", SAMPLES, "custom.hardness=0.75") == [0.75, 0.75]


def test_parts_of_one_sample_come_by_name_and_so_do_keys_of_its_row(tmp_path: Path) -> None:
    assert rewards(tmp_path, "by_parts", SAMPLES) == [2.0, 0.0]


def test_a_name_that_no_row_has_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    with pytest.raises(
        HookError, match=r"of_no_row wants hardness, which the rows do not have\. Their keys are label, .*level, prompt"
    ):
        rewards(tmp_path, "of_no_row", SAMPLES)
    with pytest.raises(
        HookError, match=r"misspelt asks for sampel. Functions of this setting can ask for args, settings, sample"
    ):
        rewards(tmp_path, "misspelt", SAMPLES)


def test_a_response_that_was_cut_off_is_not_trained_on() -> None:
    group = [Sample(status=status) for status in (Status.TRUNCATED, Status.COMPLETED, Status.ABORTED)]
    group.append(Sample(status=Status.COMPLETED, remove_sample=True))
    leave_out_truncated(None, [group])
    assert [sample.remove_sample for sample in group] == [True, False, False, True]
