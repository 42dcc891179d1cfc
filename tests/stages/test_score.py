"""Rewards come in the order of the samples, from the function that is meant, within their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from reward_functions import always_fails, hangs_on_stuck, slow_for_even_ones
from transformers import AutoModelForCausalLM

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import HookError, RecordError, SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.score import ScoreSettings
from slimectl.stages.grader import Grader, worker_count
from slimectl.stages.score import reward_number, score
from slimectl.types import Sample, Status, TrainingSample

ModelDir = Callable[..., Path]


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    made = LocalExecutor()
    yield made
    made.close()


def answered(response: str, index: int = 0, **fields: object) -> Sample:
    tokens = list(response.encode())
    return Sample(index=index, tokens=[63, *tokens], response=response, response_length=len(tokens),
                  status=Status.COMPLETED, **fields)  # fmt: skip


def rewards(settings: Settings, *samples: Sample) -> list[object]:
    grade = builders.reward(settings)
    return [sample.reward for sample in score(samples, grade, settings.score, executor=LocalExecutor())]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_rewards_stay_with_their_samples_whatever_each_takes(executor: LocalExecutor, workers: int):
    given = [answered("x", index) for index in range(9)]
    scored = list(score(given, slow_for_even_ones, ScoreSettings(workers=workers), executor=executor))
    assert [id(sample) for sample in scored] == [id(sample) for sample in given]
    assert [sample.reward for sample in scored] == [float(index) for index in range(9)]


@pytest.mark.slow
def test_an_overrun_time_limit_is_reward_0_with_the_reason_and_costs_no_other_sample(executor: LocalExecutor):
    given = [answered("stuck" if index == 2 else "fine", index) for index in range(6)]
    settings = ScoreSettings(workers=2, timeout_s=1.5)
    scored = list(score(given, hangs_on_stuck, settings, executor=executor))
    assert [sample.reward for sample in scored] == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert scored[2].metadata == {"reward_error": "took more than 1.5 s of CPU time"}
    assert all(sample.metadata == {} for sample in scored if sample.index != 2)


def test_an_error_in_a_worker_process_is_named_with_its_line(executor: LocalExecutor):
    with pytest.raises(HookError, match=r"^reward of sample 0: ValueError: broken \(reward_functions.py:\d+\)$"):
        list(score([answered("x")], always_fails, ScoreSettings(workers=1), executor=executor))


def test_nothing_is_graded_before_it_is_asked_for(executor: LocalExecutor):
    pulled = []

    def source() -> Iterator[Sample]:
        for index in range(100):
            pulled.append(index)
            yield answered("x", index)

    scored = score(source(), slow_for_even_ones, ScoreSettings(), executor=executor)
    assert [next(scored).index for _ in range(3)] == [0, 1, 2]
    assert pulled == [0, 1, 2]


def test_a_failed_attempt_gets_0_whatever_the_reward_function_says(executor: LocalExecutor):
    failed = Sample(index=7, status=Status.FAILED, remove_sample=True)
    assert [s.reward for s in score([failed], slow_for_even_ones, ScoreSettings(), executor=executor)] == [0.0]


def test_the_reference_attaches_its_own_log_probabilities(executor: LocalExecutor, model_dir: ModelDir):
    frozen = FsdpPolicy(model_dir(), HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.0)))
    given = [answered(word, index, group_index=index // 2) for index, word in enumerate(["a", "bcd", "efg hi", "j"])]
    scored = list(score(given, slow_for_even_ones, ScoreSettings(), executor=executor, reference=frozen))
    rows = [TrainingSample(s.tokens, s.response_length, [0.0] * s.response_length, group=s.group_index) for s in given]
    assert [sample.ref_log_probs for sample in scored] == frozen.log_probs(rows)
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    for sample in scored:
        with torch.no_grad():
            logprobs = model(torch.tensor([sample.tokens])).logits[0, :-1].log_softmax(-1)
        expected = logprobs[torch.arange(len(sample.tokens) - 1), sample.tokens[1:]]
        assert sample.ref_log_probs == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_dict_reward_is_kept_whole_and_one_of_its_numbers_is_trained_on(executor: LocalExecutor):
    def graded(sample: Sample) -> dict[str, object]:
        return {"accuracy": 1.0, "format": 0.25, "why": "right"}

    settings = ScoreSettings(reward_key="format")
    sample = next(score([answered("x")], graded, settings, executor=executor))
    assert sample.reward == {"accuracy": 1.0, "format": 0.25, "why": "right"}
    assert reward_number(sample, "format") == 0.25
    assert reward_number(Sample(reward={"score": 0.5, "why": ""}), None) == 0.5  # the key that needs no setting
    assert reward_number(Sample(reward=True), None) == 1.0
    with pytest.raises(HookError, match=r"reward of sample 0 is a number too large for a float, not a finite number"):
        reward_number(Sample(reward=10**400), None)
    with pytest.raises(HookError, match=r"'style' is not in the reward of sample 0 \(accuracy, format, why\)"):
        next(score([answered("x")], graded, ScoreSettings(reward_key="style"), executor=executor))
    with pytest.raises(HookError, match=r"'right', not a finite number\. .* \(key 'why'\)"):
        next(score([answered("x")], graded, ScoreSettings(reward_key="why"), executor=executor))


def test_a_function_that_is_passed_in_is_not_taken_for_the_verifier_of_the_settings(executor: LocalExecutor):
    def faulty(sample: Sample) -> float:
        return 1 / len(sample.metadata)

    settings = ScoreSettings(rm_type="exact")
    with pytest.raises(HookError, match=r"^reward of sample 0 is 'x', not a finite number"):
        next(score([answered("x")], lambda sample: "x", settings, executor=executor))
    with pytest.raises(HookError, match=r"^reward of sample 0: ZeroDivisionError: .* \(test_score.py:\d+\)$"):
        next(score([answered("x")], faulty, settings, executor=executor))


def test_the_nearest_word_decides_who_grades(tmp_path: Path):
    (tmp_path / "graders.py").write_text("def of_run(sample): return 0.1\ndef of_sample(sample): return 0.2\n")
    own, runs = f"{tmp_path}/graders.py:of_sample", f"{tmp_path}/graders.py:of_run"
    names = {"rm_type": "exact", "custom_rm_path": runs}
    everything = Settings.model_validate({"score": {**names, "allow_paths_in_records": True}})
    careful = Settings.model_validate({"score": names})
    by_type = Settings.model_validate({"score": {"rm_type": "exact"}})
    sample = {"response": "about 4 apples", "label": "4"}
    contains = {"metadata": {"rm_type": "contains"}}
    assert rewards(everything, answered(**sample, **contains, custom_rm_path=own)) == [0.2]
    assert rewards(everything, answered(**sample, **contains)) == [0.1]
    with pytest.raises(RecordError, match=r"^sample 0: custom_rm_path: .* set score\.allow_paths_in_records = true"):
        rewards(careful, answered(**sample, custom_rm_path=own))
    assert rewards(by_type, answered(**sample, **contains)) == [1.0]
    assert rewards(by_type, answered(**sample)) == [0.0]
    assert rewards(by_type, answered(response="4", label="4")) == [1.0]
    with pytest.raises(SettingsError, match=r"sample 0: no reward is set\. Set score\.rm_type"):
        rewards(Settings(), answered(**sample))


def test_an_async_reward_is_awaited_here_and_in_workers(tmp_path: Path, executor: LocalExecutor):
    file = tmp_path / "waiting.py"
    file.write_text(
        "import asyncio\n"
        "async def reward(args, sample):\n"
        "    await asyncio.sleep(0.01)\n"
        "    return len(sample.response) * args.rollout_temperature\n"
    )
    given = {"score": {"custom_rm_path": f"{file}:reward"}, "rollout": {"temperature": 0.5}}
    settings = Settings.model_validate(given)
    assert rewards(settings, answered("abcd"), answered("ab")) == [2.0, 1.0]
    in_workers = score([answered("abcd")], builders.reward(settings), ScoreSettings(workers=1), executor=executor)
    assert [sample.reward for sample in in_workers] == [2.0]


def test_a_weighted_sum_takes_the_place_of_a_type(executor: LocalExecutor):
    parts = [{"type": "exact"}, {"type": "length_penalty", "weight": -0.5, "limit": 8}]
    settings = Settings.model_validate({"score": {"rm": parts}})
    assert rewards(settings, answered("4", label="4")) == [{"score": 0.9375, "exact": 1.0, "length_penalty": 0.125}]
    assert rewards(settings, answered("4", label="4", metadata={"rm_type": "exact"})) == [1.0]
    assert worker_count(settings.score, Grader(settings)) == 0
    slow = Settings.model_validate({"score": {"rm": [{"type": "exact"}, {"type": "boxed_math"}]}})
    assert worker_count(slow.score, Grader(slow)) > 0
    with pytest.raises(SettingsError, match=r"score\.rm and score\.rm_type cannot be combined"):
        builders.reward(Settings.model_validate({"score": {"rm": parts, "rm_type": "exact"}}))


@pytest.mark.parametrize("workers", [0, 1])
def test_explained_rewards_are_the_same_rewards_with_the_reason_beside_them(executor: LocalExecutor, workers: int):
    settings = Settings.model_validate({"score": {"rm_type": "numeric"}})
    given = [answered("5 of 7", label="7"), answered("none", label="7")]
    right, wrong = score(given, builders.reward(settings).explain, ScoreSettings(workers=workers), executor=executor)
    source = "last number of the response"
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.metadata == {
        "explanation": {"extracted": "7", "from": source, "span": [5, 6], "why": "is the label '7'"}
    }
    assert wrong.metadata == {
        "explanation": {"extracted": None, "from": source, "span": None, "why": "no number there"}
    }


def test_a_function_of_ones_own_is_explained_by_what_it_returned(tmp_path: Path):
    (tmp_path / "graders.py").write_text("def half(sample): return {'score': 0.5}\n")
    path = f"{tmp_path}/graders.py:half"
    verdict = builders.reward(Settings.model_validate({"score": {"custom_rm_path": path}})).explain(answered("x"))
    assert (verdict.reward, verdict.why) == ({"score": 0.5}, f"{path} returned {{'score': 0.5}}")


def test_a_reward_function_may_reward_turns():
    def by_turn(sample: Sample) -> dict[str, object]:
        return {"score": 1.0, "turn_rewards": [0.5, {"reward": 1, "state": "end"}] if sample.index else "all"}

    [scored] = score([answered("x", 1)], by_turn, ScoreSettings(), executor=LocalExecutor())
    assert (scored.reward, scored.turn_rewards) == ({"score": 1.0}, [0.5, {"reward": 1, "state": "end"}])
    with pytest.raises(HookError, match=r"turn_rewards of sample 0: .* got str\. Fix the reward"):
        list(score([answered("x", 0)], by_turn, ScoreSettings(), executor=LocalExecutor()))
