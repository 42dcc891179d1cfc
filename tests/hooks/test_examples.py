"""One working example of every hook, in a real run of a small model: the file below, and what it changes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from workshop import set_up

from slimectl.hooks import HOOKS
from slimectl.runtime.run import TrainingRun
from slimectl.settings.layers import from_assignments, from_file
from slimectl.settings.loading import resolve

OWN = '''
import json
from slimectl.types import Sample

def tell(**facts):
    with open("told.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\\n")

def centred(values, groups):
    """Each value less the mean of its group."""
    means = {g: [v for v, other in zip(values, groups) if other == g] for g in groups}
    return [value - sum(means[g]) / len(means[g]) for value, g in zip(values, groups)]

# --- rollout

async def whole_round(args, rollout_id, data_source, attempt, evaluation):
    groups = data_source.get_samples(args.run.rollout_batch_size)
    groups = [await attempt(group) for group in groups]
    for sample in groups[0]:
        sample.reward = 0.25 * (sample.index % 2)
    return groups, {"own_metric": float(rollout_id)}

class Counting:
    """Counts on, whatever the data files say."""
    def __init__(self, args):
        self.n, self.next, self.given_back = args.n_samples_per_prompt, 0, []
    def get_samples(self, n):
        self.next += n
        return [[Sample(prompt=f"count {i}")] * self.n for i in range(self.next - n, self.next)]
    def add_samples(self, groups):
        self.given_back += groups
    def save(self, rollout_id):
        return {"next": self.next}
    def load(self, rollout_id, state):
        self.next = state["next"]
    def __len__(self):
        return 100

class Mixed(Counting):
    """Every second group is answered by a function that its samples name."""
    def get_samples(self, n):
        groups = super().get_samples(n)
        for group in groups:
            if self.next % 2 == 0:
                group[0].generate_function_path = "own.py:by_itself"
        return groups

async def by_itself(sample, sampling_params, generate):
    answer = await generate(sample.tokens, sampling_params)
    sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
    sample.metadata["own"] = True
    return sample

async def in_a_group(samples, sampling_params, generate):
    for sample in samples:
        answer = await generate(sample.tokens, sampling_params)
        sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
        sample.metadata["siblings"] = len(samples)
    return samples

def marked(sample, rollout_id, evaluation):
    sample.metadata["marks"] = [rollout_id, evaluation]

async def marked_again(args, sample):
    sample.metadata["marks"].append("again")
    return sample

def not_the_first(samples):
    return samples[0].group_index > 0, "first"

def newest_first(buffer, num_samples, rollout_id):
    tell(round=rollout_id, waiting=[group[0].group_index for group in buffer])
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]

def count_all(args, all_samples, data_source):
    tell(groups=[group[0].group_index for group in all_samples], prompts=len(data_source))

def drop_odd(args, data):
    for group in data:
        for sample in group:
            sample.remove_sample = sample.index % 2 == 1

def half_advantages(args, rollout_id, rollout_data):
    rollout_data["advantages"] = [[a / 2 for a in row] for row in rollout_data["advantages"]]

# --- score

def small_bytes(args, sample):
    return sum(token < 64 for token in sample.tokens[-sample.response_length:]) / sample.response_length

def thrice(args, samples):
    rewards = [sample.reward for sample in samples]
    return [10 * reward for reward in rewards], [3 * r for r in centred(rewards, [s.group_index for s in samples])]

# --- train

def doubled_rewards(args, samples):
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [2 * sample.reward for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }

def double_advantages(args, rollout_data):
    numbers = centred(rollout_data["rewards"], rollout_data["group_indices"])
    rollout_data["advantages"] = [[2 * a] * n for a, n in zip(numbers, rollout_data["response_lengths"])]

def triple_reinforce(args, batch, log_probs, sum_of_sample_mean):
    return sum_of_sample_mean(-3 * batch.advantages_T * log_probs), {}

def half_weights(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **_):
    assert [len(row) for row in train_log_probs] == response_lengths
    assert all(total > response for total, response in zip(total_lengths, response_lengths))
    return pg_loss * 0.5, loss_masks, {"own_weight": pg_loss * 0 + 0.5}

def four_times_the_mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduced(loss):
        parts = loss.split(response_lengths)
        return 4 * sum((part * mask).sum() / mask.sum() for part, mask in zip(parts, loss_masks))
    return reduced

# --- megatron, sync, track

def louder(pre_process, post_process, vp_stage, build):
    model = build()
    tell(pre=pre_process, post=post_process, stage=vp_stage)
    model.register_forward_hook(lambda module, inputs, hidden: hidden * 1.5)
    return model

def begin(args):
    tell(begun=args.train.backend)

def before_log_prob(args, model, store_prefix):
    tell(asked=store_prefix, chunks=len(model))

def before_step(args, rollout_id, step_id, model, optimizer, scheduler):
    tell(step=[rollout_id, step_id], lr=scheduler(0))

def no_default_log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    tell(logged=rollout_id, samples=len(samples), seconds=rollout_time > 0)
    return True

def one_more_number(rollout_id, args, data, extra_metrics):
    extra_metrics["eval/own"] = max(data["small"]["rewards"])
    return False
'''


@dataclass
class Ran:
    """What a run left behind."""

    folder: Path

    def lines(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def metrics(self) -> dict[str, float]:
        """Of the first step."""
        return next(line["metrics"] for line in self.lines("runs/a/metrics.jsonl") if "train/step" in line["metrics"])

    def samples(self, number: int = 1) -> list[dict[str, Any]]:
        return self.lines(f"runs/a/step_{number:06d}/samples.jsonl")

    @property
    def told(self) -> list[dict[str, Any]]:
        return self.lines("told.jsonl")


SMALL = (
    "run.num_rollout=1", "run.rollout_batch_size=2", "rollout.n_samples_per_prompt=3", "rollout.max_response_len=6",
    "eval.before_train=false", "eval.interval=none", "algorithm.grpo_std_normalization=false",
    "train.lr_decay_style=constant", "track.with=['jsonl']",
)  # fmt: skip

Run = Callable[..., Ran]


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[..., Path], monkeypatch: Any) -> Run:
    """A run in a folder of its own, with OWN as own.py."""

    def ran(*assignments: str) -> Ran:
        folder = tmp_path_factory.mktemp("run")
        set_up(folder, model_dir("llama"))
        (folder / "own.py").write_text(OWN)
        monkeypatch.chdir(folder)
        layers = [from_file(Path("slimectl.toml")), from_assignments([*SMALL, *assignments])]
        assert TrainingRun(resolve(layers).settings).execute()
        return Ran(folder)

    return ran


@pytest.fixture(scope="module")
def plain_metrics() -> dict[str, dict[str, float]]:
    return {}


@pytest.fixture
def plain(run: Run, plain_metrics: dict[str, dict[str, float]]) -> dict[str, float]:
    """The metrics of the same run without a hook; made once."""
    if "plain" not in plain_metrics:
        plain_metrics["plain"] = run().metrics
    return plain_metrics["plain"]


Plain = dict[str, float]


def norm(metrics: Plain, plain: Plain) -> float:
    """The gradient of a run over that of the plain one."""
    return metrics["train/grad_norm"] / plain["train/grad_norm"]


def the_function_makes_the_round(run: Run, plain: Plain) -> None:
    ran = run("rollout.function_path=own.py:whole_round")
    assert ran.metrics["rollout/own_metric"] == 1
    assert [sample["reward"] for sample in ran.samples()[:3]] == [0, 0.25, 0]
    assert 0 <= ran.samples()[3]["reward"] <= 1  # graded as [score] says


def prompts_come_from_the_source(run: Run, plain: Plain) -> None:
    ran = run("rollout.data_source_path=own.py:Counting", "rollout.data=[]", "run.num_rollout=2")
    seen = [(sample["prompt"], sample["index"]) for sample in [*ran.samples(1), *ran.samples(2)]]
    assert seen == [(f"count {i // 3}", i) for i in range(12)]


def siblings_are_sampled_in_one_call(run: Run, plain: Plain) -> None:
    samples = run("rollout.custom_generate_function_path=own.py:in_a_group").samples()
    assert [sample["metadata"]["siblings"] for sample in samples] == [3] * 6
    assert len({tuple(sample["tokens"]) for sample in samples}) == 6  # every draw has a seed of its own
    assert [sample.get("rollout_id") for sample in samples] == [None] * 6  # six executions, not two fan-outs


def every_sample_passes_all_hooks(run: Run, plain: Plain) -> None:
    samples = run("rollout.sample_hook_path=['own.py:marked', 'own.py:marked_again']").samples()
    assert [sample["metadata"]["marks"] for sample in samples] == [[1, False, "again"]] * 6


def groups_are_dropped_and_drawn_anew(run: Run, plain: Plain) -> None:
    ran = run("rollout.dynamic_sampling_filter_path=own.py:not_the_first")
    assert {sample["group_index"] for sample in ran.samples()} == {1, 2}
    assert ran.metrics["rollout/dynamic_filter/drop_first"] == 1


def the_newest_waiting_group_comes_first(run: Run, plain: Plain) -> None:
    ran = run("rollout.buffer_filter_path=own.py:newest_first", "rollout.over_sampling_batch_size=4",
              "run.num_rollout=2")  # fmt: skip
    assert ran.told == [{"round": 1, "waiting": []}, {"round": 2, "waiting": [2, 3]}]
    assert [sample["group_index"] for sample in ran.samples(2)] == [3, 3, 3, 2, 2, 2]


def dropped_groups_are_seen_too(run: Run, plain: Plain) -> None:
    ran = run("rollout.all_samples_process_path=own.py:count_all",
              "rollout.dynamic_sampling_filter_path=own.py:not_the_first")  # fmt: skip
    assert ran.told == [{"groups": [0, 1, 2], "prompts": 8}]


def odd_samples_are_not_trained_on(run: Run, plain: Plain) -> None:
    ran = run("rollout.sample_filter_path=own.py:drop_odd")
    assert [sample.get("remove_sample", False) for sample in ran.samples()] == [False, True] * 3
    assert norm(ran.metrics, plain) != pytest.approx(1, rel=1e-3)
    assert ran.metrics["rollout/raw_reward"] == plain["rollout/raw_reward"]


def half_the_advantages_are_half_the_gradient(run: Run, plain: Plain) -> None:
    metrics = run("rollout.data_postprocess_path=own.py:half_advantages").metrics
    assert norm(metrics, plain) == pytest.approx(1 / 2, rel=1e-5)
    assert metrics["rollout/advantages/max"] == pytest.approx(plain["rollout/advantages/max"] / 2)


def the_function_grades(run: Run, plain: Plain) -> None:
    for sample in run("score.custom_rm_path=own.py:small_bytes").samples():
        answer = sample["tokens"][-sample["response_length"] :]
        assert sample["reward"] == sum(token < 64 for token in answer) / len(answer)


def three_times_the_rewards_are_three_times_the_gradient(run: Run, plain: Plain) -> None:
    metrics = run("score.custom_reward_post_process_path=own.py:thrice").metrics
    assert norm(metrics, plain) == pytest.approx(3, rel=1e-5)
    assert metrics["rollout/raw_reward"] == pytest.approx(10 * plain["rollout/raw_reward"])
    assert metrics["rollout/rewards"] == pytest.approx(0, abs=1e-9)


def twice_the_rewards_are_twice_the_gradient(run: Run, plain: Plain) -> None:
    metrics = run("train.custom_convert_samples_to_train_data_path=own.py:doubled_rewards").metrics
    assert norm(metrics, plain) == pytest.approx(2, rel=1e-5)


def twice_the_advantages_are_twice_the_gradient(run: Run, plain: Plain) -> None:
    metrics = run("train.custom_advantage_function_path=own.py:double_advantages").metrics
    assert norm(metrics, plain) == pytest.approx(2, rel=1e-5)


def three_times_the_loss_is_three_times_the_gradient(run: Run, plain: Plain) -> None:
    metrics = run("train.custom_loss_function_path=own.py:triple_reinforce").metrics
    assert norm(metrics, plain) == pytest.approx(3, rel=1e-5)


def half_the_weights_are_half_the_gradient(run: Run, plain: Plain) -> None:
    metrics = run("train.custom_tis_function_path=own.py:half_weights").metrics
    assert norm(metrics, plain) == pytest.approx(1 / 2, rel=1e-5)
    assert metrics["train/own_weight"] == pytest.approx(1 / 2)


def four_times_the_mean_is_four_times_the_gradient(run: Run, plain: Plain) -> None:
    metrics = run("train.custom_pg_loss_reducer_function_path=own.py:four_times_the_mean").metrics
    assert norm(metrics, plain) == pytest.approx(4, rel=1e-5)
    assert metrics["train/pg_loss"] == pytest.approx(4 * plain["train/pg_loss"], abs=1e-6)


def the_model_is_the_users(run: Run, plain: Plain) -> None:
    ran = run("train.backend=megatron", "megatron.custom_model_provider_path=own.py:louder")
    assert ran.told == [{"pre": True, "post": True, "stage": None}]
    # The engine samples from the weights alone, which do not know of what the function added.
    assert ran.metrics["train/train_rollout_logprob_abs_diff"] > 0.01
    assert plain["train/train_rollout_logprob_abs_diff"] < 1e-4


def every_rank_begins_with_the_function(run: Run, plain: Plain) -> None:
    ran = run("train.backend=megatron", "megatron.custom_init_path=own.py:begin")
    assert ran.told == [{"begun": "megatron"}]


def the_function_comes_before_log_probs(run: Run, plain: Plain) -> None:
    ran = run("train.backend=megatron", "megatron.custom_before_log_prob_hook_path=own.py:before_log_prob",
              "algorithm.kl_loss_coef=0.1", "train.num_steps_per_rollout=2")  # fmt: skip
    assert ran.told == [{"asked": "ref_", "chunks": 1}, {"asked": "", "chunks": 1}]


def the_function_comes_before_every_step(run: Run, plain: Plain) -> None:
    ran = run("train.backend=megatron", "megatron.custom_before_train_step_hook_path=own.py:before_step",
              "train.num_steps_per_rollout=2")  # fmt: skip
    assert ran.told == [{"step": [1, i], "lr": 1e-3} for i in (0, 1)]


def trackers_get_nothing_of_the_samples(run: Run, plain: Plain) -> None:
    ran = run("track.custom_rollout_log_function_path=own.py:no_default_log")
    assert ran.told == [{"logged": 1, "samples": 6, "seconds": True}]
    tracked = [name for line in ran.lines("runs/a/tracked.jsonl") for name in line["metrics"]]
    assert [name for name in tracked if name.startswith("rollout/")] == []
    assert "train/grad_norm" in tracked
    assert math.isfinite(ran.metrics["rollout/raw_reward"])  # metrics.jsonl has all


def trackers_get_one_more_number_of_an_evaluation(run: Run, plain: Plain) -> None:
    ran = run("track.custom_eval_rollout_log_function_path=own.py:one_more_number",
              "eval.interval=1")  # fmt: skip
    tracked = {name: value for line in ran.lines("runs/a/tracked.jsonl") for name, value in line["metrics"].items()}
    assert tracked["eval/own"] == tracked["eval/small_max_reward"]


def test_a_sample_may_name_its_own_generate_function(run: Run):
    ran = run("rollout.data_source_path=own.py:Mixed", "rollout.data=[]", "rollout.allow_paths_in_records=true")
    assert ["own" in sample.get("metadata", {}) for sample in ran.samples()] == [False] * 3 + [True] * 3


EXAMPLES = {
    "rollout.function_path": the_function_makes_the_round,
    "rollout.data_source_path": prompts_come_from_the_source,
    "rollout.custom_generate_function_path": siblings_are_sampled_in_one_call,
    "rollout.sample_hook_path": every_sample_passes_all_hooks,
    "rollout.dynamic_sampling_filter_path": groups_are_dropped_and_drawn_anew,
    "rollout.buffer_filter_path": the_newest_waiting_group_comes_first,
    "rollout.all_samples_process_path": dropped_groups_are_seen_too,
    "rollout.sample_filter_path": odd_samples_are_not_trained_on,
    "rollout.data_postprocess_path": half_the_advantages_are_half_the_gradient,
    "score.custom_rm_path": the_function_grades,
    "score.custom_reward_post_process_path": three_times_the_rewards_are_three_times_the_gradient,
    "train.custom_convert_samples_to_train_data_path": twice_the_rewards_are_twice_the_gradient,
    "train.custom_advantage_function_path": twice_the_advantages_are_twice_the_gradient,
    "train.custom_loss_function_path": three_times_the_loss_is_three_times_the_gradient,
    "train.custom_tis_function_path": half_the_weights_are_half_the_gradient,
    "train.custom_pg_loss_reducer_function_path": four_times_the_mean_is_four_times_the_gradient,
    "megatron.custom_model_provider_path": the_model_is_the_users,
    "megatron.custom_init_path": every_rank_begins_with_the_function,
    "megatron.custom_before_log_prob_hook_path": the_function_comes_before_log_probs,
    "megatron.custom_before_train_step_hook_path": the_function_comes_before_every_step,
    "track.custom_rollout_log_function_path": trackers_get_nothing_of_the_samples,
    "track.custom_eval_rollout_log_function_path": trackers_get_one_more_number_of_an_evaluation,
}
ELSEWHERE = {"sync.custom_post_write_path"}
"""With a server: tests/contracts/test_sync_contract.py."""


@pytest.mark.parametrize("setting", EXAMPLES)
def test_what_a_hook_changes_in_a_run(setting: str, run: Run, plain: Plain):
    EXAMPLES[setting](run, plain)


def test_every_hook_has_an_example():
    assert set(EXAMPLES) | ELSEWHERE == set(HOOKS)
