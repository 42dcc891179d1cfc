"""Groups, histograms and comparisons of a view equal a plain computation over all records."""

from __future__ import annotations

import json
import math
import random
from itertools import groupby
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from slimectl.cli.inspect_samples import heading
from slimectl.cli.viewer import queries
from slimectl.cli.viewer.conversation import Message, attempt_tree, conversation, own_prompt
from slimectl.cli.viewer.token_colours import COLOURS
from slimectl.cli.viewer.token_view import marked_parts, sample_view, token_texts
from slimectl.cli.viewer.turns import turns_of
from slimectl.data.sample_index import SampleIndex, prompt_hash


def samples(seed: int = 3, groups: int = 40) -> list[dict]:
    rng = random.Random(seed)
    records = []
    for group in range(groups):
        for _ in range(rng.randint(1, 5)):
            length = rng.randint(1, 9)
            records.append({
                "group_index": group, "index": len(records), "prompt": f"prompt {group % 30}", "label": str(group),
                "tokens": [7] * (length + 2), "response": f"answer {rng.randint(0, 9)}", "response_length": length,
                "reward": rng.choice([0.0, 0.25, 1.0, None]), "status": rng.choice(["completed", "truncated"]),
                "weight_versions": [str(rng.randint(3, 5))], "metadata": {"level": rng.randint(0, 2)},
            })  # fmt: skip
    rng.shuffle(records)
    return records


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return samples()


def index_of(path: Path, records: list[dict]) -> SampleIndex:
    path.write_text("".join(json.dumps(line) + "\n" for line in records))
    index = SampleIndex(path)
    index.extend()
    return index


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, records: list[dict]) -> SampleIndex:
    return index_of(tmp_path_factory.mktemp("samples") / "samples.jsonl", records)


def by_group(records: list[dict]) -> dict[int, list[dict]]:
    ordered = sorted(records, key=lambda line: line["group_index"])
    return {number: list(lines) for number, lines in groupby(ordered, key=lambda line: line["group_index"])}


def rewards(lines: list[dict]) -> list[float]:
    return [line["reward"] for line in lines if line["reward"] is not None]


PLAIN = {
    "group": lambda lines: lines[0]["group_index"],
    "reward": lambda lines: fmean(rewards(lines)) if rewards(lines) else math.nan,
    "best": lambda lines: max(rewards(lines), default=math.nan),
    "worst": lambda lines: min(rewards(lines), default=math.nan),
    "spread": lambda lines: pstdev(rewards(lines)) if rewards(lines) else math.nan,
    "length": lambda lines: fmean(line["response_length"] for line in lines),
    "longest": lambda lines: max(line["response_length"] for line in lines),
    "size": len,
    "version": lambda lines: min(int(line["weight_versions"][0]) for line in lines),
    "mismatch": lambda lines: math.nan,
}


@pytest.mark.parametrize("sort", queries.SORT_KEYS)
@pytest.mark.parametrize("descending", [False, True])
def test_groups_are_sorted_as_a_plain_sort_does(index: SampleIndex, records: list[dict], sort: str, descending: bool):
    values = {number: PLAIN[sort](lines) for number, lines in by_group(records).items()}
    answer = queries.list_groups(index, sort=sort, descending=descending, page=slice(500))
    numbers = [group["group"] for group in answer["groups"]]
    assert sorted(numbers) == sorted(values)
    ordered = [values[number] for number in numbers]
    finite = [value for value in ordered if not math.isnan(value)]
    assert finite == pytest.approx(sorted(finite, reverse=descending))
    assert not any(math.isnan(value) for value in ordered[: len(finite)])  # groups without a value come last


def test_pages_of_groups_join_to_the_whole(index: SampleIndex):
    whole = [group["group"] for group in queries.list_groups(index, sort="reward", page=slice(500))["groups"]]
    pages = [
        group["group"]
        for offset in range(0, 60, 7)
        for group in queries.list_groups(index, sort="reward", page=slice(offset, offset + 7))["groups"]
    ]
    assert pages == whole


@pytest.mark.parametrize(
    ("where", "search", "plain"),
    [
        ("reward > 0.5", "", lambda line: (line["reward"] or 0) > 0.5),
        ("reward == null", "", lambda line: line["reward"] is None),
        ("status == 'truncated' and response_length > 4", "",
         lambda line: line["status"] == "truncated" and line["response_length"] > 4),
        ("metadata.level == 2", "", lambda line: line["metadata"]["level"] == 2),
        ("", "ANSWER 3", lambda line: line["response"] == "answer 3"),
        ("reward > 0 and 'answer 3' in response", "prompt",
         lambda line: (line["reward"] or 0) > 0 and line["response"] == "answer 3"),
        ("1 < 2", "", lambda line: True),
    ],
)  # fmt: skip
def test_filters_keep_the_groups_of_matching_samples(index: SampleIndex, records: list[dict], where, search, plain):
    answer = queries.list_groups(index, where=where, search=search, page=slice(500))
    matching = [line for line in records if plain(line)]
    assert matching
    assert answer["matches"] == len(matching)
    assert {group["group"] for group in answer["groups"]} == {line["group_index"] for line in matching}
    rows = {row for group in answer["groups"] for row in group["matches"]}
    assert {index.record(row)["index"] for row in rows} == {line["index"] for line in matching}


def test_histograms_count_every_finite_value_once(index: SampleIndex, records: list[dict]):
    answer = queries.histograms(index, version=5)
    histograms = answer["histograms"]
    assert sum(histograms["reward"]["counts"]) == len(rewards(records))
    assert dict(zip(histograms["staleness"]["centers"], histograms["staleness"]["counts"], strict=True)) == {
        float(5 - version): sum(line["weight_versions"] == [str(version)] for line in records) for version in (3, 4, 5)
    }
    assert histograms["mismatch"] is None
    flat = [lines for lines in by_group(records).values() if len(lines) > 1 and len(set(rewards(lines))) == 1]
    assert answer["flat_groups"] == len(flat)


def test_a_group_has_all_its_answers_and_a_prompt_all_its_appearances(index: SampleIndex, records: list[dict]):
    group = queries.group(index, 3)
    assert sorted(sample["index"] for sample in group["samples"]) == sorted(
        line["index"] for line in records if line["group_index"] == 3
    )
    appearance = queries.prompt_in(index, prompt_hash("prompt 3"))
    assert appearance is not None
    assert len(appearance["rows"]) == sum(line["prompt"] == "prompt 3" for line in records)
    assert queries.prompt_in(index, 1) is None


def test_a_comparison_names_the_prompts_that_became_right_and_wrong(tmp_path: Path):
    def file(name: str, rewards: dict[str, list[float]]) -> SampleIndex:
        lines = [
            {"prompt": prompt, "reward": reward, "response": f"{name}", "response_length": 0, "tokens": []}
            for prompt, values in rewards.items()
            for reward in values
        ]
        return index_of(tmp_path / name, lines)

    before = file("a", {"up": [0, 0], "down": [1], "same": [1], "half": [1, 0], "only a": [1]})
    after = file("b", {"up": [1, 1], "down": [0], "same": [1], "half": [1, 1], "only b": [1]})
    answer = queries.compare(before, after, threshold=1.0)
    assert (answer["shared"], answer["became_right"], answer["became_wrong"]) == (4, 2, 1)
    assert (answer["before_mean"], answer["after_mean"]) == (0.625, 0.75)
    assert [prompt["prompt"] for prompt in answer["prompts"]][2:] == ["half", "same"]
    wrong = queries.compare(before, after, threshold=1.0, only="wrong")
    assert [prompt["prompt"] for prompt in wrong["prompts"]] == ["down"]
    assert queries.compare(before, after, threshold=0.5)["became_right"] == 1


def decoded(tokens) -> str:
    return "".join(map(chr, tokens))


USER_TURN = "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "templated", "messages"),
    [
        ([{"role": "system", "content": "Short."}, {"role": "user", "content": "2+2"}], "anything",
         [("system", "Short."), ("user", "2+2")]),
        ("2+2", "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n",
         [("system", "Short."), ("user", "2+2")]),
        ("2+2", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2+2<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n", [("user", "2+2")]),
        ("2+2", "<bos><start_of_turn>user\n2+2<end_of_turn>\n<start_of_turn>model\n", [("user", "2+2")]),
        ("2+2", "[gMASK]<sop><|system|>\nShort.<|user|>\n2+2<|assistant|>\n",
         [("prompt", "[gMASK]<sop>"), ("system", "Short."), ("user", "2+2")]),
        ("2+2", "<｜begin▁of▁sentence｜><｜User｜>2+2<｜Assistant｜>", [("user", "2+2")]),
    ],
)  # fmt: skip
def test_a_sample_is_a_conversation_in_each_family_of_templates(prompt, templated: str, messages: list):
    """Two responses of the policy, which recorded turns delimit, and a user's message between them."""
    texts = ["4<|im_end|>", USER_TURN, "Yes.<|im_end|>"]
    first, second = len(texts[0]), len(texts[0] + texts[1])
    record = {"prompt": prompt, "tokens": [*map(ord, templated + "".join(texts))],
              "response_length": len("".join(texts)),
              "metadata": {"agent": {"turns": [[0, first], [second, len("".join(texts))]]}}}  # fmt: skip
    assert [(message.role, message.text) for message in conversation(record, decoded)] == [
        *messages, ("assistant", "4"), ("user", "Sure?"), ("assistant", "Yes."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "rewards"),
    [
        ([0.5, 1], [0.5, 1]),
        ([{"start": 4, "end": 6, "reward": 2.0}], [None, 2.0]),
        ([0.5], [None, None]),  # of which turn?
        ([{"start": [], "reward": "x"}, "x"], [None, None]),
        ("x", [None, None]),
        (None, [None, None]),
    ],
)
def test_a_turn_shows_its_reward(entries: Any, rewards: list[float | None]):
    record = {"tokens": [0] * 8, "response_length": 6, "loss_mask": [1, 1, 0, 0, 1, 1], "turn_rewards": entries}
    assert [turn.get("reward") for turn in turns_of(record, 2) if turn["author"] == "policy"] == rewards
    shown = [f"{reward:.4g}" for reward in rewards if reward is not None]
    assert f"reward 1 of turns {' '.join(shown)}, label" in heading(record | {"reward": 1}) or not shown


def test_a_prompt_without_a_template_and_its_response_are_two_messages():
    record = {"prompt": "cat>", "tokens": [*map(ord, "cat>tac")], "response_length": 3, "response": "tac"}
    both = [Message("prompt", "prompt", "cat>"), Message("response", "policy", "tac")]
    assert conversation(record, decoded) == both
    assert conversation(record, None) == both


def message(text: str, role: str = "user") -> Message:
    return Message(role, {"user": "environment", "assistant": "policy"}[role], text)


def test_the_branches_of_an_attempt_are_a_tree_of_messages():
    """Rows 0 and 1 fork behind a shared answer, row 2 continues it, and row 3 ends with it."""
    start, answer = message("hi"), message("four", "assistant")
    tree = attempt_tree({
        0: [start, answer, message("sure?"), message("yes", "assistant")],
        1: [start, answer, message("why?"), message("so", "assistant")],
        2: [start, message("four and more", "assistant")],
        3: [start, answer],
    })  # fmt: skip

    def plain(node: dict[str, Any]) -> tuple:
        return [one["text"] for one in node["messages"]], node["rows"], [plain(child) for child in node["children"]]

    assert plain(tree) == (["hi", "four"], [3], [
        (["sure?", "yes"], [0], []), (["why?", "so"], [1], []), ([" and more"], [2], []),
    ])  # fmt: skip


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"prompt": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]}


def test_the_prompt_of_a_group_is_what_its_branches_share():
    assert own_prompt([chat("task", "another past", "go on"), chat("task")]) == chat("task")["prompt"]
    assert own_prompt([chat("a judge's question"), chat("task")]) == chat("task")["prompt"]  # recorded last to first
    assert own_prompt([{"prompt": "task"}]) == "task"
    assert own_prompt([]) == ""


def test_the_ends_of_a_scale_are_full_strength():
    ends = {colour.name: colour.ends for colour in COLOURS}
    assert ends["logprob"] == (0, -5)
    assert ends["ratio"] == pytest.approx((0.740818, 1.349859), rel=1e-6)  # e^-0.3, e^0.3
    assert ends["advantage"] == (-2, 2)
    ratio = next(colour for colour in COLOURS if colour.name == "ratio")
    assert [ratio.strength(value) for value in (0, 0.740818, 1, 1.161834, 1.349859, 9)] == pytest.approx(
        [-1, -1, 0, 0.5, 1, 1], abs=1e-5
    )


def test_slices_of_a_long_sample_join_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slimectl.cli.viewer.token_view.MAX_TOKENS", 4)
    line = {"prompt": "p", "tokens": list(range(65, 76)), "response": "x", "response_length": 6,
            "loss_mask": [1, 1, 0, 0, 1, 1], "rollout_log_probs": [-1.0, -2.0, 0.0, 0.0, -3.0, -4.0]}  # fmt: skip
    index = index_of(tmp_path / "samples.jsonl", [line])
    views = [sample_view(index, 0, start=start, decode=lambda ids: "".join(map(chr, ids))) for start in (0, 4, 8)]
    assert [token for view in views for token in view["ids"]] == line["tokens"]
    assert "".join(text for view in views for text in view["texts"]) == "ABCDEFGHIJK"
    assert [value for view in views for value in view["columns"]["rollout_log_probs"]] == [None] * 5 + line[
        "rollout_log_probs"
    ]
    assert [(turn["author"], turn["start"], turn["end"]) for turn in views[0]["turns"]] == [
        ("prompt", 0, 5), ("policy", 5, 7), ("environment", 7, 9), ("policy", 9, 11),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "metadata",
    [{"agent": {"turns": [[0, 2], [2, 4], [6, 8]]}}, {}, {"agent": {"turns": [[5, 3]]}}, {"agent": {"turns": "x"}},
     {"agent": {"turns": [[0, 99]]}}],
)  # fmt: skip
def test_what_another_branch_teaches_is_the_policys(tmp_path: Path, metadata: dict[str, Any]):
    """Four tokens of two answers that another branch teaches, two of a tool, two that are taught here."""
    line = {"prompt": "p", "tokens": list(range(10)), "response": "x", "response_length": 8, "metadata": metadata,
            "loss_mask": [0, 0, 0, 0, 0, 0, 1, 1], "rollout_log_probs": [-1, -2, -3, -4, 0, 0, -5, -6]}  # fmt: skip
    view = sample_view(index_of(tmp_path / "samples.jsonl", [line]), 0, start=0, decode=None)
    answers = [(2, 4), (4, 6)] if len(metadata.get("agent", {}).get("turns", "x")) == 3 else [(2, 6)]
    assert [(turn["author"], turn["start"], turn["end"], turn["taught"]) for turn in view["turns"]] == [
        ("prompt", 0, 2, False), *(("policy", *answer, False) for answer in answers), ("environment", 6, 8, False),
        ("policy", 8, 10, True),
    ]  # fmt: skip
    assert view["authors"] == ["prompt"] * 2 + ["policy"] * 4 + ["environment"] * 2 + ["policy"] * 2


def test_calls_results_and_messages_are_found_in_the_texts_of_tokens():
    texts = ["<|im_", "start|>user", "\n", "hi", "<tool", "_call>{}</tool_call>", ".", "<tool_response>", "1", "2"]
    assert [(part["kind"], part["start"], part["end"]) for part in marked_parts(texts, 100)] == [
        ("message", 100, 103), ("call", 104, 106), ("result", 107, 110),
    ]  # fmt: skip
    assert marked_parts(["", "", "plain < text", ""], 0) == []


def test_a_character_of_several_tokens_is_the_text_of_its_last():
    def decode(ids) -> str:
        return bytes(ids).decode("utf-8", "replace")

    letters = "aé漢😀z"
    texts = token_texts(list(letters.encode()), decode)
    assert texts == ["a", "", "é", "", "", "漢", "", "", "", "😀", "z"]
    assert "".join(token_texts([65, 0xFF, 66], decode)).startswith("A")
