"""Functions with the signatures of slime's documents run as they stand: sources, texts, paths, logs and losses."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workshop import set_up

from slimectl.data.prompt_dataset import PromptDataset, restored
from slimectl.data.records import sample_from_json, sample_to_json
from slimectl.errors import HookError, RecordError
from slimectl.hooks import HOOKS, check_hooks
from slimectl.hooks.loss import CustomLoss
from slimectl.hooks.reward import UserReward
from slimectl.hooks.training_batch import post_process_rewards
from slimectl.hooks.user_hooks import UserHooks, user_eval_log, user_rollout_log
from slimectl.migrate.launch_scripts.reading import read
from slimectl.runtime.builders import data_source, hook_settings
from slimectl.runtime.run import TrainingRun
from slimectl.settings import Settings
from slimectl.settings.layers import from_assignments, from_file
from slimectl.settings.loading import resolve
from slimectl.stages.generation import GroupGenerator
from slimectl.stages.hooks import Hooks
from slimectl.stages.prompt_groups import UserDataSource
from slimectl.stages.text_responses import fill_tokens
from slimectl.types import Prompt, Sample, SamplerState, StepReport, TokenBatch, TrainingSample

FILE = str(Path(__file__).with_name("document_functions.py"))


def settings(*assignments: str) -> Settings:
    return resolve([from_assignments(["rollout.n_samples_per_prompt=2", *assignments])]).settings


class ByteTokenizer:
    """A token for each byte."""

    chat_template = "<role>content, and <assistant> at the end"

    def apply_chat_template(self, chat: list[dict[str, Any]], **options: Any) -> str:
        turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in chat)
        return turns + "<assistant>" * bool(options.get("add_generation_prompt"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **options: Any) -> str:
        return bytes(tokens).decode()


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def render(prompt: Prompt) -> list[int]:
    return tokens_of(prompt.text if isinstance(prompt.text, str) else "".join(turn["content"] for turn in prompt.text))


# --- paths without the name of a function -----------------------------------------------------------------------------

ONE, MANY = "def reward_func(sample): return 1\n", "def batched_custom_rm(samples): return []\n"


@pytest.mark.parametrize(
    ("text", "batched", "name"),
    [
        (ONE, False, "reward_func"),
        (ONE + MANY, False, "reward_func"),
        (ONE + MANY, True, "batched_custom_rm"),
        (MANY, False, "batched_custom_rm"),
        ("def compute_reward(samples, **kwargs): return []\n", True, "compute_reward"),
        ("from document_functions import reward_func\ndef custom_rm(sample): return 1\n", False, "custom_rm"),
        ("from document_functions import reward_func\n", False, "reward_func"),
    ],
)
def test_a_path_without_a_name_means_the_customary_one(text: str, batched: bool, name: str, tmp_path: Path):
    (tmp_path / "rm.py").write_text(text)
    loaded = HOOKS["score.custom_rm_path"].load(f"{tmp_path}/rm.py", batched=batched)
    assert loaded.path == f"{tmp_path}/rm.py:{name}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            ONE + "def custom_rm(sample): return 1\n",
            "rm.py has reward_func and custom_rm. Choose one, as in .*rm.py:rew",
        ),
        ("def mine(sample): return 1\n", "no function with a customary name .*Give the function, .* It has mine$"),
        ("x = 1\n", "It has no functions$"),
    ],
)
def test_a_path_without_a_name_is_refused_where_it_is_in_doubt(text: str, message: str, tmp_path: Path):
    (tmp_path / "rm.py").write_text(text)
    with pytest.raises(HookError, match=message):
        HOOKS["score.custom_rm_path"].load(f"{tmp_path}/rm.py")


@pytest.mark.parametrize("path", ["pack.mine", "pack.mine.custom_loss", "pack.mine:custom_loss"])
def test_a_module_is_named_like_a_file(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "mine.py").write_text("def custom_loss(batch): return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert HOOKS["train.custom_loss_function_path"].load(path).function.__module__ == "pack.mine"


@pytest.mark.parametrize(("text", "path"), [("custom_rm.py", "custom_rm.py"), ("mine.rm", "mine:rm"), ("mine", "mine")])
def test_a_flag_of_a_launch_script_may_name_a_file(text: str, path: str, tmp_path: Path):
    (tmp_path / "run.sh").write_text(
        f"python3 train.py --hf-checkpoint /m --prompt-data /d.jsonl --rollout-seed 1 --custom-rm-path {text}"
    )
    assert read(tmp_path / "run.sh", environ={}).conversion.settings.score.custom_rm_path == path


def test_group_rm_picks_the_function_of_many_samples():
    assert not UserReward(FILE, settings()).takes_many
    assert UserReward(FILE, settings("score.group_rm=true")).takes_many


# --- responses as text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "tokens", "length"),
    [
        ({"response": "ja"}, "ab ja", 2),
        ({"response": "ja", "tokens": tokens_of("ab ")}, "ab ja", 2),
        ({"response": "ja", "tokens": [...]}, "ab ja", 2),
        ({"response": "x", "tokens": tokens_of("ab xyz")}, "ab xyz", 3),
        ({"response": "x", "tokens": tokens_of("other x"), "response_length": 1}, "other x", 1),
        ({"response": ""}, "", 0),
    ],
)
def test_a_response_without_tokens_is_tokenized(values: dict[str, Any], tokens: str, length: int):
    sample = Sample(prompt="ab ", **values)
    fill_tokens(sample, render=render, tokenizer=ByteTokenizer(), name="own")
    assert (sample.tokens, sample.response_length) == (tokens_of(tokens), length)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"response": "x", "tokens": [1, 2]}, "own: sample 3 has a response, but its tokens do not begin with"),
        ({"response": "ja", "loss_mask": [1]}, "own: sample 3: loss_mask has 1 values for 2 response tokens"),
        ({"response": None}, "own: sample 3: response is NoneType. Set it to a string"),
        ({"tokens": [1], "response_length": 2}, "own: sample 3: tokens has 1 values, but the response has 2"),
        ({"tokens": [1, 2], "response_length": 2}, "own: sample 3: tokens has 2 values, but the response has 2"),
        ({"status": "done"}, "own: sample 3: status is 'done'. Set it to one of Sample.Status: PENDING, COMPLETED"),
    ],
)
def test_a_response_that_does_not_fit_its_tokens_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(HookError, match=message):
        fill_tokens(Sample(index=3, prompt="ab ", **values), render=render, tokenizer=ByteTokenizer(), name="own")


def test_a_status_may_be_given_by_its_value():
    sample = Sample(tokens=[1, 2], response_length=1, status="truncated")
    fill_tokens(sample, render=render, tokenizer=ByteTokenizer(), name="own")
    assert sample.status is Sample.Status.TRUNCATED


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return {}['gold']", "KeyError: 'gold' (own.py:2)"),
        ("sample.response = 'x' * 9; return sample", "ContextFullError: 11 tokens do not fit into a context of 10"),
        ("sample.response, sample.loss_mask = 'x' * 9, [1] * 8 + [0]; return sample", None),
    ],
)
def test_an_attempt_that_fails_says_why(body: str, error: str | None, tmp_path: Path):
    (tmp_path / "own.py").write_text(f"async def own(sample):\n    {body}\n")
    done = asyncio.run(attempts(context=10).complete(named(f"{tmp_path}/own.py:own", "ab")))
    expected = ("completed", False) if error is None else ("failed", True)
    assert [(sample.status, sample.remove_sample) for sample in done] == [expected] * 2
    assert done[0].metadata.get("error") == error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return samples[:1]", r"own.py:own returned 1 samples for 2 attempts. Return all of them"),
        (
            "samples[0].prompt, samples[0].response = [{'role': 'user', 'content': 3}], 'x'; return samples",
            r"own.py:own: sample 0: prompt: message\[0\].content: is neither a string nor a list",
        ),
    ],
)
def test_what_a_function_of_a_group_returns_is_checked(body: str, message: str, tmp_path: Path):
    (tmp_path / "own.py").write_text(f"async def own(samples):\n    {body}\n")
    with pytest.raises(HookError, match=message):
        asyncio.run(attempts().complete(named(f"{tmp_path}/own.py:own", "ab")))


def attempts(*assignments: str, context: int | None = None) -> GroupGenerator:
    chosen = settings(*assignments, "custom.max_turns=5", "rollout.allow_paths_in_records=true")
    hooks = UserHooks(chosen)
    return GroupGenerator(
        SimpleNamespace(max_context=context), ByteTokenizer(), chosen.rollout, hooks=Hooks(agent_at=hooks.agent_at)
    )


def named(path: str, prompt: Any) -> list[Sample]:
    prompts = [copy.deepcopy(prompt) for _ in range(2)]
    return [Sample(index=i, prompt=prompts[i], tokens=[1, 2], generate_function_path=path) for i in range(2)]


def test_a_function_that_a_record_names_may_take_the_whole_group():
    done = asyncio.run(attempts().complete(named(f"{FILE}:custom_generate", "ab")))
    assert [sample.response for sample in done] == ["maybe", "yes"]
    assert [sample.tokens for sample in done] == [[1, 2, *tokens_of("maybe")], [1, 2, *tokens_of("yes")]]
    assert [sample.loss_mask for sample in done] == [[0, 1, 1, 1, 1], [0, 1, 1]]
    assert [sample.reward for sample in done] == [5.0, 7.0]  # both samples in one call


def test_a_chat_that_a_function_continued_is_rendered_again():
    chat = [{"role": "user", "content": "so"}]
    first, second = asyncio.run(attempts().complete(named(f"{FILE}:generate", chat)))
    text = "<user>so<assistant>hm<user>well?<assistant>"
    assert first.tokens == second.tokens == tokens_of(text + "yes")
    assert (first.response_length, len(first.prompt)) == (3, 3)


def test_samples_of_a_group_share_neither_prompt_nor_tokens():
    first, second = attempts().new_group(Prompt([{"role": "user", "content": "so"}]))
    first.prompt.append({})
    first.tokens.append(1)
    assert (len(second.prompt), second.tokens) == (1, tokens_of("<user>so<assistant>"))


# --- data sources -----------------------------------------------------------------------------------------------------


def source_of(name: str, folder: Path, *assignments: str, state: SamplerState | None = None) -> UserDataSource:
    rows = [{"prompt": f"{i}+{i}=", "label": str(2 * i), "level": i} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = settings(f"rollout.data_source_path={FILE}:{name}", f"rollout.data={folder}/rows.jsonl", *assignments)
    made = data_source(hook_settings(chosen, None))
    generator = GroupGenerator(SimpleNamespace(max_context=None), ByteTokenizer(), chosen.rollout)
    return UserDataSource(made, generator, state or SamplerState())


def test_a_sample_of_a_source_is_a_prompt_with_the_label_of_its_row(tmp_path: Path):
    groups = source_of("ListSource", tmp_path).get_samples(4)
    assert [len(group) for group in groups] == [2] * 4
    assert sorted(group[0].prompt for group in groups) == ["0+0=", "1+1=", "2+2=", "3+3="]
    for number, group in enumerate(groups):
        assert [(s.group_index, s.index) for s in group] == [(number, 2 * number), (number, 2 * number + 1)]
        assert [s.label for s in group] == [str(2 * int(group[0].prompt[0]))] * 2
        assert (group[1].tokens, group[1].level) == (tokens_of(group[0].prompt), int(group[0].prompt[0]))


def test_a_source_that_saves_nothing_resumes_at_the_position_of_its_dataset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    state = SamplerState()
    source = source_of("ListSource", tmp_path, state=state)
    expected = [group[0].prompt for group in source.get_samples(6)]
    again = source_of("ListSource", tmp_path, state=state)
    again.get_samples(2)
    again.save(1)
    state.rounds = 1
    with caplog.at_level(logging.WARNING, "slimectl"):
        resumed = source_of("ListSource", tmp_path, state=state)
    assert "ListSource has no load, so its own state starts again" in caplog.text
    assert [group[0].prompt for group in resumed.get_samples(4)] == expected[2:]


def test_a_source_takes_groups_from_its_buffer_by_its_own_filter(tmp_path: Path):
    source = source_of("BufferedSource", tmp_path)
    groups = [
        [Sample(index=i, prompt="p", response_length=1, tokens=[1, 2], reward=r)] * 2 for i, r in enumerate([1, 3, 2])
    ]
    source.add_samples(groups)
    assert [group[0].reward for group in source.get_samples(4)] == [3, 2, 1, None]


def test_groups_cannot_be_given_back_to_a_source_without_add_samples(tmp_path: Path):
    with pytest.raises(HookError, match="ListSource has no add_samples, but groups were returned to it"):
        source_of("ListSource", tmp_path).add_samples([])


def test_a_dataset_is_a_sequence_whose_chats_keep_their_rows():
    row = Prompt([{"role": "user", "content": "hi"}], label="x", tools=[{"type": "function"}], images=["/a.png"])
    dataset = PromptDataset(lambda: [row, Prompt("b")], seed=1)
    assert (len(dataset), dataset[1], next(iter(dataset))[0]["content"], dataset[-1:]) == (2, "b", "hi", ["b"])
    assert sorted(map(str, dataset.sample(4))) == sorted(map(str, [*dataset, *dataset]))  # two epochs
    sample = restored(Sample(prompt=dataset[0], metadata={"mine": 1}))
    assert (type(sample.prompt), sample.label, sample.metadata) == (list, "x", {"tools": row.tools, "mine": 1})
    assert sample.multimodal_inputs == {"images": ["/a.png"]}


# --- whole runs -------------------------------------------------------------------------------------------------------

SMALL = (
    "run.rollout_batch_size=2", "rollout.n_samples_per_prompt=2", "rollout.max_response_len=6", "run.num_rollout=1",
    "eval.before_train=false", "track.with=['jsonl']",
)  # fmt: skip


def ran(folder: Path, model: Path, *assignments: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run one round, and return its samples and the metrics at the tracker."""
    set_up(folder, model)
    layers = [from_file(Path("slimectl.toml")), from_assignments([*SMALL, *assignments])]
    assert TrainingRun(resolve(layers).settings).execute()
    lines = (folder / "runs/a/step_000001/samples.jsonl").read_text().splitlines()
    tracked = [json.loads(line)["metrics"] for line in (folder / "runs/a/tracked.jsonl").read_text().splitlines()]
    return list(map(json.loads, lines)), {name: value for metrics in tracked for name, value in metrics.items()}


def test_a_source_a_text_generator_and_a_log_make_a_run(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    hooks = {
        "rollout.data_source_path": f"{FILE}:ListSource",
        "rollout.custom_generate_function_path": f"{FILE}:custom_generate",
        "train.custom_loss_function_path": FILE,
        "track.custom_rollout_log_function_path": FILE,
        "score.custom_rm_path": "null",
    }
    assignments = [f"{setting}={path}" for setting, path in hooks.items()]
    samples, tracked = ran(tmp_path, model_dir("llama"), *assignments, "custom.max_turns=5")
    assert [sample["tokens"] for sample in samples] == [
        [*sample["prompt"].encode(), *sample["response"].encode()] for sample in samples
    ]
    assert [f"say {sample['label']}" for sample in samples] == [sample["prompt"] for sample in samples]
    assert [sample["reward"] for sample in samples] == [5.0, 7.0, 5.0, 7.0]
    assert tracked["rollout/first"] == 5.0
    assert tracked["train/reward"] == 24.0
    assert tracked["train/grad_norm"] > 0


def test_a_rollout_function_asks_the_model_for_texts(
    model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    samples, _ = ran(
        tmp_path, model_dir("llama"), f"rollout.function_path={FILE}:generate_rollout", "rollout.temperature=0.5"
    )
    assert [(s["group_index"], s["index"]) for s in samples] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert [s["label"] for s in samples] == ["one", "one", "two", "two"]
    for sample in samples:
        assert sample["tokens"][: -sample["response_length"]] == tokens_of(sample["prompt"])
        assert len(sample["rollout_log_probs"]) == sample["response_length"] == 6
        assert (sample["rollout_temperature"], sample["status"]) == (0.5, "truncated")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "from slimectl.types import Sample\ndef generate(prompts): return [[Sample(response='x')]]",
            r"returned groups of \[1\] samples for prompts of \[2, 2\]. Return a group for each prompt",
        ),
        (
            "async def generate(prompts, model): return model.generate('x')",
            r"model\.generate cannot be called by an async function. Await generate",
        ),
        ("def generate(prompts, model): return model.generate('x', temprature=1)", "unknown key 'temprature'"),
    ],
)
def test_a_rollout_function_that_does_not_fit_is_refused(
    text: str, message: str, model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(HookError, match=message):
        ran(tmp_path, model_dir("llama"), "rollout.function_path=own.py")


# --- losses, rewards and logs -----------------------------------------------------------------------------------------


def pack() -> TokenBatch:
    """Two rows with responses of one and two tokens, of a vocabulary of two."""
    rows = [
        TrainingSample(tokens=[0, 1, 1], response_length=1, loss_weights=[0.5], reward=2.0),
        TrainingSample(tokens=[1, 0, 1], response_length=2, loss_weights=[0.25, 0.0], reward=3.0),
    ]
    logits_TV = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)], [0.0, 0.0]], requires_grad=True)
    return TokenBatch(
        logits_TV.log_softmax(-1).gather(-1, torch.tensor([[1], [0], [1]]))[:, 0], None, torch.tensor([0, 1, 1]), 2,
        weights_T=torch.tensor([0.5, 0.25, 0.0]), advantages_T=torch.tensor([1.0, -2.0, 5.0]), total_lengths=[3, 3],
        logits_T=logits_TV, samples=rows,
    )  # fmt: skip


def test_a_loss_reads_its_batch_as_a_dict():
    loss, metrics = CustomLoss(settings(f"train.custom_loss_function_path={FILE}"))(pack())
    # -1 * ln(1/2) * 0.5 + 2 * ln(1/4) * 0.25: the second row's last token has no weight.
    assert loss.item() == pytest.approx(0.5 * math.log(2) - 0.5 * math.log(4))
    assert metrics["reward"].item() == 5.0


def test_the_entries_of_a_batch(tmp_path: Path):
    (tmp_path / "own.py").write_text("def custom_loss(batch, sum_of_sample_mean, log_probs):\n    seen.append(batch)\n"
                                     "    return sum_of_sample_mean(log_probs)\nseen = []\n")  # fmt: skip
    loss = CustomLoss(settings(f"train.custom_loss_function_path={tmp_path}/own.py"))
    loss(pack())
    (batch,) = HOOKS["train.custom_loss_function_path"].load(f"{tmp_path}/own.py").function.__globals__["seen"]
    plain = {
        key: [part.tolist() if hasattr(part, "tolist") else part for part in value] for key, value in batch.items()
    }
    assert plain.pop("log_probs") == [[pytest.approx(math.log(0.5))], pytest.approx([math.log(0.25), math.log(0.5)])]
    assert plain == {
        "advantages": [[1.0], [-2.0, 5.0]],
        "loss_masks": [[1.0], [1.0, 0.0]],
        "response_lengths": [1, 2],
        "total_lengths": [3, 3],
        "rewards": [2.0, 3.0],
        "tokens": [[0, 1, 1, 1, 0, 1]],
        "unconcat_tokens": [[0, 1, 1], [1, 0, 1]],
    }
    assert (batch.get("values"), "values" in batch, batch.advantages_T.tolist()) == (None, False, [1.0, -2.0, 5.0])
    with pytest.raises(KeyError, match=r"values is not in this batch\. It has advantages, log_probs, loss_masks"):
        batch["values"]


def test_dict_rewards_reach_their_post_processing():
    chosen = settings(f"score.custom_reward_post_process_path={FILE}", "score.reward_key=right")
    samples = [Sample(reward={"right": 1.0, "long": 1.0}), Sample(reward={"right": 0.0, "long": 1.0})]
    assert post_process_rewards(samples, settings=chosen) == ([0.5, -0.5], [1.0, -1.0])


ROUND = [Sample(group_index=i // 2, index=i, reward=float(i)) for i in range(4)]


@pytest.mark.parametrize(
    ("name", "metric", "logged"),
    # First of a group: (0 + 2) / 2. All: (0 + 1 + 2 + 3) / 4. A function of groups is called twice, with own metrics.
    [("log_rollout_data", {"rollout/first": 1.0}, [[2, 2]]), ("log_flat", {"rollout/mean": 1.5}, [["before"]])],
)
def test_a_log_function_gets_samples_or_groups(
    name: str, metric: dict[str, float], logged: list[Any], monkeypatch: pytest.MonkeyPatch
):
    chosen = settings(f"track.custom_rollout_log_function_path={FILE}:{name}")
    function = HOOKS["track.custom_rollout_log_function_path"].load(f"{FILE}:{name}").function
    for _ in range(2):
        monkeypatch.setitem(function.__globals__, "logged", [])
        report = StepReport(1, 1, "1", {}, samples=ROUND)
        assert user_rollout_log(report, {"rollout/old": 4.0, "train/loss": 1.0}, settings=chosen) == {
            "train/loss": 1.0, "rollout/old": 4.0, **metric,
        }  # fmt: skip
        assert function.__globals__["logged"] == logged


def test_the_log_of_an_evaluation_gets_groups_too():
    chosen = settings(f"track.custom_eval_rollout_log_function_path={FILE}")
    assert user_eval_log(1, {"small": ROUND}, {"eval/small": 0.5}, settings=chosen) == {
        "eval/small": 0.5,
        "eval/first": 2.0,
    }


# --- the sample -------------------------------------------------------------------------------------------------------


def test_counters_of_a_sample_add_up_and_are_kept():
    sample = Sample()
    meta = {"finish_reason": {"type": "length"}, "weight_version": "3", "cached_tokens": 2, "prompt_tokens": 8}
    sample.append_response_tokens(
        [5], log_probs=[-1.0], meta_info={**meta, "spec_verify_ct": 2, "completion_tokens": 6}
    )
    sample.append_response_tokens([5], log_probs=[-1.0], meta_info={**meta}, update_terminal_info=False)
    assert (sample.status, sample.weight_versions) == (Sample.Status.TRUNCATED, ["3"])
    assert (sample.spec_info.spec_accept_length, sample.spec_info.spec_accept_rate) == (3.0, 0.0)
    assert (sample.prefix_cache_info.prefix_cache_hit_rate, Sample().prefix_cache_info.to_dict()) == (
        0.25, {"cached_tokens": 0, "total_prompt_tokens": 0},
    )  # fmt: skip
    record = sample_to_json(sample)
    assert record["prefix_cache_info"] == {"cached_tokens": 2, "total_prompt_tokens": 8}
    assert sample_from_json(json.loads(json.dumps(record))).spec_info.spec_accept_length == 3.0
    assert (
        Sample.from_dict({"spec_info": {"spec_verify_ct": 1}, "prefix_cache_info": None}).spec_info.spec_verify_ct == 1
    )
    twin = copy.deepcopy(sample)
    twin.spec_info.spec_verify_ct += 1
    assert (sample.spec_info.spec_verify_ct, pickle.loads(pickle.dumps(twin)).spec_info.spec_verify_ct) == (2, 3)
    info = Sample.SpecInfo.from_dict({"spec_draft_token_num": 4})
    info.spec_accept_token_num += 1
    assert (info.spec_accept_rate, isinstance(info, dict), Sample.PrefixCacheInfo()) == (0.25, True, {})
    with pytest.raises(AttributeError, match="has no counter 'accepted'"):
        info.accepted = 1


@pytest.mark.parametrize("name", ["mopd_teacher_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"])
def test_fields_that_nothing_reads_are_none_and_cannot_be_set(name: str):
    sample = Sample()
    setattr(sample, name, None)
    assert getattr(sample, name) is None
    with pytest.raises(AttributeError, match=f"Sample.{name} has no effect: "):
        setattr(sample, name, [1])


def test_routed_experts_may_be_nested_lists():
    record = {"tokens": [1, 2, 3], "response_length": 1, "rollout_routed_experts": [[[0, 3]], [[2, 1]]]}
    assert sample_from_json(record).rollout_routed_experts == {"shape": [2, 1, 2], "dtype": "uint8", "data": "AAMCAQ=="}
    with pytest.raises(RecordError, match=r"expected \[tokens, layers, experts of a token\], got \[2, 2\]"):
        sample_from_json({**record, "rollout_routed_experts": [[0, 3], [2, 1]]})


def test_hooks_of_files_without_names_are_checked_before_a_run():
    check_hooks(settings(f"score.custom_rm_path={FILE}", f"train.custom_loss_function_path={FILE}"))
