"""The worked examples of agents: their tools, and what they make of a model's calls."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from workshop import Workshop

from slimectl.checkpoints.create import byte_tokenizer
from slimectl.data.chat import render
from slimectl.errors import BackendError, RecordError
from slimectl.recipes.agents import calculator, code, debate, search
from slimectl.settings import Settings
from slimectl.types import Completion, Prompt, Sample, SamplingParams

TEXT = byte_tokenizer()
CORPUS = "The Rhine flows to Rotterdam.\n\nThe Elbe flows to Hamburg.\n\nBread is made of flour.\n"


def made(function: Any, *lines: str, **more: Any) -> Any:
    """What the agent makes of a model that says these lines."""
    said = list(lines)

    async def generate(tokens: list[int], params: SamplingParams) -> Completion:
        line = said.pop(0)
        written = [*TEXT.encode(line, add_special_tokens=False), TEXT.convert_tokens_to_ids("<|im_end|>")]
        return Completion(written, [-0.5] * len(written), line, "stop")

    chat = [{"role": "user", "content": "?"}]
    sample = Sample(prompt=chat, tokens=render(Prompt(chat), TEXT), metadata=more.pop("metadata", {}))
    params = SamplingParams(max_tokens=2000, seed=3)
    return asyncio.run(function(sample=sample, sampling_params=params, generate=generate, tokenizer=TEXT, **more))


def read(sample: Sample) -> str:
    """What the model did not write itself."""
    response = sample.tokens[sample.prompt_length :]
    return str(TEXT.decode([token for token, bit in zip(response, sample.mask(), strict=True) if not bit]))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2*21", "42"), ("-(3 - 5) / 4", "0.5"), ("7 // 2 + 7 % 2", "4"), ("1/0", "error: division by zero"),
        ("9**9**9", "error: only numbers and + - * / // %"), ("(", "error: only numbers and + - * / // %"),
        ("9" * 60, "error: too large"), ("'a'*9", "error: only numbers and + - * / // %"),
        ("open('x')", "error: only numbers and + - * / // %"), ("1e308*10", "error: too large"),
    ],
)  # fmt: skip
def test_the_calculator_computes_and_says_what_is_wrong(expression: str, value: str):
    assert calculator.calculated(expression) == value


def test_the_calculator_answers_until_it_is_not_asked():
    sample = made(calculator.generate, "<calc>2*21</calc> and <calc>1/0</calc>", "So 42.")
    assert "user\n42\nerror: division by zero<|im_end|>" in read(sample)
    assert sample.response.startswith("<calc>2*21</calc>")
    assert sample.response.endswith("So 42.")


def test_the_agent_of_the_documentation_asks_and_is_told():
    page = Path(__file__).parents[2] / "docs" / "agents.md"
    names: dict[str, Any] = {}
    exec(page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0], names)
    sample = made(names["generate"], "<lookup>answer", "It is 42.")
    assert "user\n42<|im_end|>" in read(sample)
    assert sample.response.endswith("It is 42.")
    assert names["generate"].resumes is True


def test_bm25_is_computed_as_published():
    index = search.Bm25(["a b", "a a c c"])
    # By hand: idf(b) = ln(1 + 1.5/1.5) = ln 2; length 2 of mean 3: 1.2 * (0.25 + 0.75 * 2/3) = 0.9; 2.2 / 1.9.
    assert index.score("b", 0) == pytest.approx(math.log(2) * 2.2 / 1.9)
    assert index.best("a") == ["a a c c", "a b"]
    assert index.best("nowhere") == []


def test_search_shows_the_passages_that_fit(tmp_path: Path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(CORPUS)
    words, metadata = ("<search>Elbe</search>", "Hamburg."), {"corpus": str(corpus)}
    with pytest.raises(RecordError, match=r"metadata\.corpus: is a file path, .* Set rollout\.allow_paths_in_records"):
        made(search.generate, *words, metadata=metadata, args=Settings())
    trusting = Settings.model_validate({"rollout": {"allow_paths_in_records": True}})
    sample = made(search.generate, *words, metadata=metadata, args=trusting)
    assert "The Elbe flows to Hamburg." in read(sample)
    assert "Bread" not in read(sample)
    assert sample.non_generation_time > 0


def test_search_without_a_corpus_says_what_to_give():
    with pytest.raises(RecordError, match=r"prompt 0: metadata\.corpus: missing\. Set it to the text file"):
        made(search.generate, "<search>Elbe</search>", args=Settings())


def test_programs_run_in_the_sandbox_and_their_output_is_read():
    class Args:
        class score:
            rm_options = {"allow_weaker": True}  # noqa: RUF012

    try:
        code.printed("print(1)", allow_unsandboxed_namespaces=True)
    except BackendError as error:
        pytest.skip(str(error))
    sample = made(code.generate, "```python\nprint(6 * 7)\n```", "```\n1/0\n```", "42", args=Args)
    assert "user\n42\n<|im_end|>" in read(sample)
    assert "ZeroDivisionError" in read(sample)


def test_both_sides_of_a_debate_are_samples_that_read_each_other():
    one, other = made(debate.generate, "yes", "no", "still yes", "fine, yes")
    assert [one.metadata["side"], other.metadata["side"]] == [0, 1]
    assert "Another answered: no\nAnswer again." in read(one)
    assert "Another answered: yes\nAnswer again." in read(other)
    assert one.response.startswith("yes")
    assert other.response.endswith("fine, yes")


@pytest.mark.slow
def test_agents_train_in_a_run(workshop: Workshop):
    """A whole run of two-sided debates: fan-outs are one rollout, and what is read is not trained on."""
    path = "slimectl.recipes.agents.debate:generate"
    options = ["run.num_rollout=1", "rollout.apply_chat_template=true", "rollout.max_response_len=150", "eval.data={}",
               "eval.interval=none", f"rollout.custom_generate_function_path={path}"]  # fmt: skip
    workshop.slimectl("run", *[word for each in options for word in ("-s", each)])
    lines = (workshop.folder / "runs" / "a" / "step_000001" / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 32
    assert {sample["rollout_id"] for sample in samples} == set(range(16))
