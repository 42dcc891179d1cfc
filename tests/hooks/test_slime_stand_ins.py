"""Values of slime's stand-ins, worked out by hand."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slimectl.errors import CheckpointError, HookError, RecordError, SettingsError
from slimectl.hooks import FlatSettings
from slimectl.migrate.slime import (
    absent,
    arguments,
    data,
    generation,
    graders,
    grading,
    losses,
    metrics,
    requests,
    results,
    tokens,
)
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.types import Sample


def arguments_of(*assignments: str) -> FlatSettings:
    return FlatSettings(resolve([from_assignments(list(assignments))]).settings)


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_graders_give_the_rewards_of_slimes() -> None:
    half = r"It is \boxed{\frac{1}{2}}."
    assert graders.grade_answer_verl(half, "0.5")
    assert not graders.grade_answer_verl("It is 0.5.", "0.5")
    assert not graders.grade_answer_verl(half, None)
    assert (graders.extract_answer(half), graders.extract_answer("none")) == (r"\frac{1}{2}", None)
    assert graders.remove_boxed(graders.last_boxed_only_string(half)) == r"\frac{1}{2}"
    assert graders.get_deepscaler_rule_based_reward(rf"<think>x</think>{half}", "1/2") == 1
    assert graders.get_deepscaler_rule_based_reward(half, "1/2") == 0  # the thought never ended
    assert graders.compute_score("Answer: 7", "7") == {"score": 1.0, "acc": True, "pred": "7"}
    assert graders.compute_score("Answer: 7", "7", strict_box_verify=True) == {"score": -1.0, "acc": False, "pred": ""}
    # Two of three words are predicted, and two of four are right: 2 * 2/3 * 1/2 / (2/3 + 1/2) = 4/7.
    assert graders.f1_score("green tall tree", "tall tree near house") == pytest.approx((4 / 7, 2 / 3, 1 / 2))
    assert graders.f1_score("", "tree") == graders.f1_score(None, "tree") == (0.0, 0.0, 0.0)
    assert graders.compute_gpqa_reward("The answer is B.", "B") == 1.0
    keywords = {"instruction_id_list": ["count:word_count_range"], "kwargs": [{"min_words": 2, "max_words": 3}]}
    assert [graders.compute_ifbench_reward(text, "", keywords) for text in ("two words", "one")] == [1.0, 0.0]
    with pytest.raises(RecordError, match="instruction_id_list: missing"):
        graders.compute_ifbench_reward("x", "", {})


def test_rewards_are_those_of_the_settings_or_of_the_samples_metadata() -> None:
    args = arguments_of("score.rm_type=exact")
    samples = [
        Sample(response="a", label="a"),
        Sample(response="b", label="a"),
        Sample(response="The answer is C.", label="C", metadata={"rm_type": "gpqa"}),
    ]
    assert asyncio.run(grading.batched_async_rm(args, samples)) == [1.0, 0.0, 1.0]
    assert asyncio.run(grading.async_rm(args, samples[0])) == 1.0
    assert [sample.reward for sample in samples] == [None] * 3
    with pytest.raises(SettingsError, match="no reward is set"):
        asyncio.run(grading.async_rm(arguments_of(), samples[0]))
    with pytest.raises(SettingsError, match=r"score.rm_url: no address is set"):
        asyncio.run(grading.remote_rm(args, samples[0]))
    with pytest.raises(HookError, match="args is of the class dict"):
        asyncio.run(grading.async_rm({}, samples[0]))


# --- mathematics ------------------------------------------------------------------------------------------------------


def test_divergences_and_clipped_losses() -> None:
    new, base = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    assert losses.compute_approx_kl(new, base, "k1").tolist() == [0.5, 0.0]
    assert losses.compute_approx_kl(new, base, "k2").tolist() == [0.125, 0.0]
    k3 = math.exp(-0.5) - 1 + 0.5
    ratio = torch.tensor([2.0, 1.0])
    assert losses.compute_approx_kl(new, base, "low_var_kl", ratio).tolist() == pytest.approx([2 * k3, 0.0])
    # The ratio e^0.5 = 1.649 is clipped at 1.2; e^-0.5 = 0.607 is not clipped for A > 0.
    loss, clipped = losses.compute_policy_loss(torch.tensor([-0.5, 0.5]), torch.tensor([1.0, 1.0]), 0.2, 0.2)
    assert loss.tolist() == pytest.approx([-1.2, -math.exp(-0.5)])
    assert clipped.tolist() == [1.0, 0.0]
    mask = torch.tensor([1.0, 0.0])
    assert losses.compute_gspo_kl([new], [base], [new], [mask]).tolist() == [-0.5, -0.5]


def test_returns_and_advantages() -> None:
    kl, mask = [torch.tensor([0.5, 0.0])], [torch.tensor([1, 1])]
    assert losses.get_grpo_returns(torch.tensor([2.0]), kl)[0].tolist() == [2.0, 2.0]
    # The last token has 1; the first -0.1 * 0.5 + 0.9 * 1.
    returns = losses.get_reinforce_plus_plus_returns(torch.tensor([1.0]), kl, mask, [2], [3], 0.1, 0.9)
    assert returns[0].tolist() == pytest.approx([0.85, 1.0])
    baseline = losses.get_reinforce_plus_plus_baseline_advantages(torch.tensor([1.0]), kl, mask, 0.1)
    assert baseline[0].tolist() == pytest.approx([0.95, 1.0])
    # delta_1 = 1 - 0.5 = 0.5; delta_0 = 0 + 0.9 * 0.5 - 0.2 = 0.25; A_0 = 0.25 + 0.9 * 0.8 * 0.5 = 0.61.
    values, rewards = torch.tensor([0.2, 0.5]), torch.tensor([0.0, 1.0])
    advantages, value_targets = losses.get_advantages_and_returns_batch([3], [2], [values], [rewards], 0.9, 0.8)
    assert advantages[0].tolist() == pytest.approx([0.61, 0.5])
    assert value_targets[0].tolist() == pytest.approx([0.81, 1.0])


def test_sums_over_samples_and_log_probabilities() -> None:
    values, masks = torch.tensor([1.0, 3.0, 5.0]), [torch.tensor([1.0, 1.0]), torch.tensor([0.0])]
    assert losses.get_sum_of_sample_mean([4, 2], [2, 1], masks)(values) == 2.0
    assert losses.get_sum_of_sample_mean([4, 2], [2, 1], masks, calculate_per_token_loss=True)(values) == 4.0
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    sequences = [torch.tensor([0, 1]), torch.tensor([1, 0])]
    _, columns = losses.get_log_probs_and_entropy(
        logits[None], args=None, unconcat_tokens=sequences, total_lengths=[2, 2], response_lengths=[1, 1],
        with_entropy=True,
    )  # fmt: skip
    assert torch.cat(columns["log_probs"]).tolist() == pytest.approx([math.log(0.75), math.log(0.5)])
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert torch.cat(columns["entropy"]).tolist() == pytest.approx([entropy, math.log(2)])
    with pytest.raises(ValueError, match="logits have 2 rows for 3 response tokens"):
        losses.get_log_probs_and_entropy(
            logits, args=None, unconcat_tokens=sequences, total_lengths=[2, 2], response_lengths=[2, 1]
        )
    with pytest.raises(ValueError, match="1 log-probabilities for 2 response tokens"):
        losses.slice_log_prob_with_cp([0.0], 3, 2)


def test_statistics() -> None:
    # Groups of four with one and with no success: pass@1 = (1/4 + 0) / 2, pass@2 = (1 - C(3,2)/C(4,2)) / 2 = 1/4.
    rates = metrics.compute_pass_rate([1, 0, 0, 0, 0, 0, 0, 0], 4)
    assert rates == pytest.approx({"pass@1": 0.125, "pass@2": 0.25, "pass@4": 0.5})
    assert metrics.compute_pass_rate([1, 0], 1) == {}
    with pytest.raises(ValueError, match="3 rewards are not 1 groups of 2"):
        metrics.compute_pass_rate([1, 0, 1], 2)
    assert metrics.compute_statistics([3, 1, 2]) == {"mean": 2.0, "median": 2.0, "max": 3.0, "min": 1.0}
    assert (metrics.has_repetition("ab" * 5001), metrics.has_repetition("ab" * 5000)) == (True, False)
    assert metrics.compression_ratio("") == (math.inf, 0.0)
    due = [metrics.should_run_periodic_action(number, 3, num_rollout=8) for number in range(8)]
    assert [number + 1 for number, is_due in enumerate(due) if is_due] == [3, 6, 8]
    assert not metrics.should_run_periodic_action(2, None)
    counter = results.MetricGatherer()
    counter.on_dynamic_filter_drop("a")
    counter.on_dynamic_filter_drop(None)
    assert counter.collect() == {"rollout/dynamic_filter/drop_a": 1}
    fallback = results.DynamicFilterOutput(False, "a", keep_when_insufficient=True)
    drops = [
        results.should_drop_dynamic_filter_output(fallback, remaining_batch_size=remaining, target_data_size=4)
        for remaining in (4, 5)
    ]
    assert drops == [False, True]


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"say {word}", "label": word} for word in ("one", "two", "three")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "p.jsonl"


class Letters:
    """A tokenizer with a token per letter, as far as the length of a prompt goes."""

    chat_template, bos_token_id, is_fast = None, None, True

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def encode(self, text: str, **options: Any) -> list[int]:
        return self(text)["input_ids"]


def test_a_dataset_leaves_out_long_prompts_and_is_shuffled_by_epoch(prompts: Path) -> None:
    assert [row["label"] for row in data.read_file(f"{prompts}@[1:3]")] == ["two", "three"]
    whole = data.Dataset(str(prompts), Letters(), prompt_key="prompt", label_key="label")
    short = data.Dataset(str(prompts), Letters(), None, 7, prompt_key="prompt")
    assert [(sample.prompt, sample.label) for sample in short.samples] == [("say one", None), ("say two", None)]
    whole.shuffle(1)
    first = [sample.label for sample in whole.samples]
    whole.shuffle(2)
    whole.shuffle(1)
    assert [sample.label for sample in whole.samples] == first
    assert (sorted(first), len(whole), whole[0].label) == (["one", "three", "two"], 3, first[0])
    assert data.get_minimum_num_micro_batch_size([5, 4, 3, 2], 7) == 2  # 5 + 2 and 4 + 3


def test_a_source_goes_on_where_it_was_saved_with_its_buffer(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load_tokenizer", lambda path: Letters())
    args = arguments_of(f"rollout.data=['{prompts}']", "rollout.n_samples_per_prompt=2", "rollout.shuffle=false",
                        "run.name=a")  # fmt: skip
    source = data.RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(2)
    assert [(sample.group_index, sample.index, sample.prompt) for sample in groups[1]] == [
        (1, 2, "say two"), (1, 3, "say two"),
    ]  # fmt: skip
    source.add_samples([groups[0]])
    source.update_metadata({"stage": 1})
    source.save(1)
    again = data.RolloutDataSourceWithBuffer(args)
    again.load(1)
    assert (again.get_metadata(), again.get_buffer_length()) == ({"stage": 1}, 1)
    assert [group[0].prompt for group in again.get_samples(3)] == ["say one", "say three", "say one"]
    with pytest.raises(CheckpointError, match="the position of the data source is missing"):
        again.load(7)
    with pytest.raises(ValueError, match="lists of 2 samples"):
        again.add_samples([groups[0][:1]])
    with pytest.raises(RuntimeError, match="does not take samples back"):
        data.RolloutDataSource(args).add_samples([])


def test_a_source_of_another_dataset() -> None:
    class Words:
        def sample(self, count: int) -> list[str]:
            return ["a", "b"][:count]

    source = data.RolloutDataSource(Words(), arguments_of("rollout.n_samples_per_prompt=2"))
    assert [[sample.prompt for sample in group] for group in source.get_samples(2)] == [["a", "a"], ["b", "b"]]


# --- tokens, arguments, requests --------------------------------------------------------------------------------------


def test_masks_and_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGBA", (2, 1), "red")
    image.save(tmp_path / "red.png")
    assert tokens.get_response_lengths([[0, 0, 1, 0, 1], [0, 0]]) == [3, 0]
    parts = [{"type": "text", "text": "what?"}, {"type": "image", "image": str(tmp_path / "red.png")}]
    vision = tokens.process_vision_info([{"role": "user", "content": parts}])
    assert (vision["images"][0].size, vision["videos"]) == ((2, 1), None)
    assert tokens.encode_image_for_rollout_engine(image).startswith("data:image/png;base64,iVBORw0KGgo")
    with pytest.raises(RecordError, match="it has a video"):
        tokens.process_vision_info([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}])
    assert tokens.build_processor_kwargs({"images": [1]})["images_kwargs"] == {"return_tensors": "pt"}


def test_arguments_are_slimes_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def parsed(*words: str) -> FlatSettings:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        return arguments.parse_args(lambda parser: parser.add_argument("--tool-limit", type=int, default=3) and parser)

    args = parsed("--num-rollout", "4", "--lr", "2e-6", "--ci-test", "--use-wandb", "--tool-limit", "5")
    assert (args.num_rollout, args.lr, args.ci_test, args.use_wandb, args.tool_limit) == (4, 2e-6, True, True, 5)
    for words, message in {
        ("--num-rolout", "4"): "--num-rolout is not a flag of slime",
        ("--num-rollout", "many"): "--num-rollout many: 'many' is not a number\n",
        ("--advantage-estimator", "mine"): "mine has no counterpart",
    }.items():
        with pytest.raises(SystemExit):
            parsed(*words)
        assert message in capsys.readouterr().err


def test_coroutines_ports_and_addresses() -> None:
    async def outer() -> Any:
        return requests.run(inner())

    async def inner() -> str:
        return "done"

    assert (requests.run(inner()), asyncio.run(outer())) == ("done", "done")
    port = requests.get_free_port(20_000, consecutive=2)
    assert requests.is_port_available(port)
    args = arguments_of("engine.url=['http://a.example:1','http://b.example:2']")
    assert (requests.get_rollout_num_engines(args), generation.get_model_url(args, "actor")) == (
        2, "http://a.example:1/generate",
    )  # fmt: skip
    with pytest.raises(HookError, match=r"no model 'ref'. The engine has the policy only"):
        generation.get_model_url(args, "ref")
    args = arguments_of("custom.sglang_model_routers={ref=['b.example',2]}")
    assert generation.get_model_url(args, "ref", "/health") == "http://b.example:2/health"


def test_what_cannot_work_here_says_so_when_it_is_called() -> None:
    with pytest.raises(HookError, match=r"eval_rollout of slime does not work in slimectl. Call generate_rollout"):
        absent.eval_rollout(None, 1)
    with pytest.raises(HookError, match=r'Set algorithm.name = "opd"'):
        absent.post_process_rewards(None, [])
    with pytest.raises(HookError, match=r"CLAUDE_CODE of slime does not work in slimectl.*rollout.agent"):
        absent.CLAUDE_CODE.run(None, prompt="p")


def test_a_reward_that_asks_for_itself_is_refused(tmp_path: Path) -> None:
    lines = ["from slime.rollout.rm_hub import async_rm", "async def own(args, sample):"]
    (tmp_path / "own.py").write_text("\n".join([*lines, "    return await async_rm(args, sample)"]))
    args = arguments_of(f"score.custom_rm_path={tmp_path}/own.py:own")
    with pytest.raises(HookError, match=r"async_rm calls the reward function of the settings, and this function calls"):
        asyncio.run(grading.async_rm(args, Sample(response="2")))
