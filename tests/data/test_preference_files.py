"""Preferences in the forms that people have them in: what was asked, and what the two answers are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slimectl.checkpoints.create import byte_tokenizer
from slimectl.data.columns import PromptOptions
from slimectl.data.preferences import Preference, open_preferences
from slimectl.errors import RecordError
from slimectl.settings import Settings
from slimectl.stages.preferences import preferred
from slimectl.types import Sample

USER = {"role": "user", "content": "2+3?"}
FIVE, SIX = ({"role": "assistant", "content": text} for text in ("5", "6"))
MORE = {"role": "user", "content": "sure?"}
TOKENIZER = byte_tokenizer()


def opened(folder: Path, *rows: Any) -> list[Preference]:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(open_preferences([str(file)]))


def test_bad_rows_are_left_out(tmp_path: Path):
    file, bad = tmp_path / "pairs.jsonl", list[str]()
    pair = '{"prompt": "2+3?", "chosen": "5", "rejected": "6"}\n'
    file.write_text(pair + "{bad\n" + '{"prompt": "2+3?", "chosen": "5"}\n' + pair)
    keys = {"input_key": "prompt", "metadata_key": "metadata", "tool_key": "tools"}
    pairs = list(open_preferences([str(file)], PromptOptions(**keys), on_bad_row=lambda error: bad.append(str(error))))
    assert [pair.chosen.index for pair in pairs] == [0, 3]
    assert [text.split("pairs.jsonl:")[1][:13] for text in bad] == ["2: not JSON: ", "3: no key 're"]


def sampled(folder: Path, *rows: Any) -> list[Sample]:
    return list(preferred(opened(folder, *rows), TOKENIZER, Settings().rollout))


def told(sample: Sample) -> tuple[str, str]:
    """The text before what counts, and what counts."""
    answer = [token for token, bit in zip(sample.tokens[-sample.response_length :], sample.mask(), strict=True) if bit]
    return TOKENIZER.decode(sample.tokens[: -sample.response_length]), TOKENIZER.decode(answer)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [FIVE], "rejected": [SIX]},
        {"prompt": "2+3?", "chosen": [FIVE], "rejected": [SIX]},
        {"prompt": [USER], "chosen": [USER, FIVE], "rejected": [USER, SIX]},
        {"prompt": "2+3?", "chosen": [USER, FIVE], "rejected": [USER, SIX]},
        {"chosen": [USER, FIVE], "rejected": [USER, SIX]},
        {"prompt": None, "chosen": [USER, FIVE], "rejected": [USER, SIX]},
        {"prompt": [USER], "chosen": "5", "rejected": "6"},
        {"messages": [USER], "chosen": [FIVE], "rejected": [SIX]},
        {"conversations": [{"from": "human", "value": "2+3?"}],
         "chosen": {"from": "gpt", "value": "5"}, "rejected": {"from": "gpt", "value": "6"}},
    ],
)  # fmt: skip
def test_chats_of_every_form_are_the_same_two_samples(tmp_path: Path, row: dict[str, Any]):
    chosen, rejected = sampled(tmp_path, row)
    asked = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    assert [told(sample) for sample in (chosen, rejected)] == [(asked, "5<|im_end|>"), (asked, "6<|im_end|>")]
    assert [(s.index, s.group_index, s.reward) for s in (chosen, rejected)] == [(0, 0, 1.0), (1, 0, 0.0)]


def test_only_what_the_assistant_said_after_the_shared_turns_counts(tmp_path: Path):
    shared = [USER, FIVE, MORE]
    long = [{"role": "assistant", "content": "yes"}, MORE, {"role": "assistant", "content": "quite"}]
    chosen, rejected = sampled(tmp_path, {"chosen": [*shared, *long], "rejected": [*shared, SIX]})
    assert told(chosen)[1] == "yes<|im_end|>quite<|im_end|>"
    assert told(rejected)[1] == "6<|im_end|>"
    assert told(chosen)[0].endswith("sure?<|im_end|>\n<|im_start|>assistant\n")
    given, _ = sampled(tmp_path, {"prompt": shared, "chosen": "yes", "rejected": "no"})
    assert told(given)[1] == "yes<|im_end|>"


def test_texts_without_a_prompt_are_cut_after_the_last_word_they_share(tmp_path: Path):
    chosen, rejected = sampled(
        tmp_path, {"chosen": "Human: 2+3?\nAssistant: five", "rejected": "Human: 2+3?\nAssistant: fifty"}
    )
    assert told(chosen) == ("Human: 2+3?\nAssistant:", " five<|end|>")
    assert told(rejected) == ("Human: 2+3?\nAssistant:", " fifty<|end|>")


def test_equal_answers_are_no_error(tmp_path: Path):
    chosen, rejected = sampled(tmp_path, {"chosen": [USER, FIVE], "rejected": [USER, FIVE]})
    assert told(chosen) == told(rejected)
    assert told(chosen)[1] == "5<|im_end|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x", "chosen": "a"}, "no key 'rejected'. Its keys are prompt, chosen"),
        ({"prompt": "x", "chosen": "a", "rejected": [SIX]}, "rejected: one answer is a string and the other a chat"),
        ({"prompt": "x", "chosen": "a", "rejected": {"no": 1}}, "rejected: expected a string or a number"),
        ({"prompt": "x", "chosen": [{"content": "a"}], "rejected": [SIX]}, "chosen: message 0 of the chat"),
        ({"chosen": "yes it is", "rejected": "no"}, "begin with different words. Give their prompt"),
        ({"chosen": [FIVE], "rejected": [SIX]}, "chosen: begins with an assistant message. Give the prompt"),
        ({"prompt": "x", "chosen": [USER, FIVE], "rejected": [USER, SIX]}, "chosen: does not begin with the prompt"),
        ({"chosen": [USER, FIVE], "rejected": [USER, MORE]}, "rejected: no assistant message after"),
        ({"chosen": [], "rejected": [USER, SIX]}, "chosen: empty"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "prompt: empty"),
    ],
)
def test_what_is_no_preference_is_refused_with_file_and_line(tmp_path: Path, row: dict[str, Any], message: str):
    good = {"prompt": "x", "chosen": "a", "rejected": "b"}
    with pytest.raises(RecordError, match=rf"pairs.jsonl:2: .*{message}"):
        sampled(tmp_path, good, row)


def test_a_chat_that_the_template_refuses_is_told_with_its_side(tmp_path: Path):
    strict = byte_tokenizer()
    strict.chat_template = "{% if messages | length > 3 %}{{ raise_exception('too long') }}{% endif %}" + str(
        strict.chat_template
    )
    pairs = opened(tmp_path, {"chosen": [USER, FIVE], "rejected": [USER, SIX, MORE, SIX]})
    with pytest.raises(RecordError, match=r"pairs.jsonl:1: rejected: prompt: the chat template refuses.*too long"):
        list(preferred(pairs, strict, Settings().rollout))
