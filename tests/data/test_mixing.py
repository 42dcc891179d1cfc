"""Sources mixed by weight: proportions, any position, epochs, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from workshop import Workshop

from slimectl.data.columns import PromptOptions
from slimectl.data.prompts import open_prompts
from slimectl.errors import SettingsError


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    for name, size in (("a", 3), ("b", 5)):
        rows = [json.dumps({"prompt": f"{name}{i}"}) + "\n" for i in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def drawn(two: list[str], count: int, **options) -> list[str]:
    prompts = open_prompts(two, PromptOptions(weights=[3.0, 1.0], epochs=None, **options))
    return [str(prompt.text) for prompt in itertools.islice(prompts, count)]


def test_sources_come_in_proportion_to_their_weights(two: list[str]):
    texts = drawn(two, 4000)
    # 3000 expected of a; the standard deviation is sqrt(4000 * 3/4 * 1/4) = 27.
    assert abs(sum(text[0] == "a" for text in texts) - 3000) < 4 * 27


def test_each_source_keeps_its_own_order_and_begins_again_at_its_end(two: list[str]):
    texts = drawn(two, 100)
    for name, size in (("a", 3), ("b", 5)):
        own = [text for text in texts if text[0] == name]
        assert own == [f"{name}{i % size}" for i in range(len(own))]


@pytest.mark.parametrize("shuffle_seed", [None, 7])
def test_a_mix_goes_on_from_any_position(two: list[str], shuffle_seed: int | None):
    whole = drawn(two, 60, shuffle_seed=shuffle_seed)
    for start in (1, 4, 17, 59):
        assert drawn(two, 60 - start, shuffle_seed=shuffle_seed, start=start) == whole[start:]
    prompts = open_prompts(two, PromptOptions(weights=[3.0, 1.0], epochs=None, start=17))
    assert next(prompts).index == 17


def test_the_mix_of_a_seed_never_changes(two: list[str]):
    """Runs resume across versions: this order is a promise."""
    assert "".join(text[0] for text in drawn(two, 20, mix_seed=42)) == "aabaaaaababaabababab"
    assert drawn(two, 20, mix_seed=42) != drawn(two, 20, mix_seed=43)


def test_an_epoch_of_a_mix_is_as_many_prompts_as_its_sources_have(two: list[str]):
    assert len(list(open_prompts(two, PromptOptions(weights=[1.0, 1.0], epochs=2)))) == 16


def test_weights_are_settings_and_one_is_wanted_for_each_source(workshop: Workshop):
    data = ["-s", 'rollout.data=["prompts.jsonl@[0:1]", "prompts.jsonl@[4:8]"]', "-s", "rollout.max_response_len=1"]
    out = workshop.slimectl("rollout", "-c", "slimectl.toml", *data, "-s", "rollout.data_weights=[9, 1]", "-n", "1")
    prompts = [json.loads(line)["prompt"] for line in out.splitlines()]
    assert len(prompts) == 5
    assert prompts.count("say one") > 2
    workshop.slimectl("rollout", "-c", "slimectl.toml", *data, "-s", "rollout.data_weights=[1]", code=2)
    assert workshop.stderr == (
        "slimectl: rollout.data_weights: 1 weights for 2 sources of rollout.data. Give one weight per source.\n"
    )


@pytest.fixture
def domains(tmp_path: Path) -> list[str]:
    """Two files of rows of three domains, as a column, in the metadata, or absent."""
    rows = [
        {"prompt": "m0", "domain": "math"},
        {"prompt": "c0", "metadata": {"domain": "code"}},
        {"prompt": "x0"},
        {"prompt": "m1", "domain": "math"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    return [str(tmp_path / "*.jsonl")]


def mixed_domains(sources: list[str], count: int, **options) -> list[str]:
    chosen = PromptOptions(domain_weights={"math": 3.0, "code": 1.0}, epochs=None, **options)
    return [str(prompt.text) for prompt in itertools.islice(open_prompts(sources, chosen), count)]


def test_domains_come_in_proportion_and_each_in_its_own_order(domains: list[str]):
    texts = mixed_domains(domains, 400)
    own = [text for text in texts if text[0] == "m"]
    assert own == [f"m{i % 2}" for i in range(len(own))]
    assert set(texts) == {"m0", "m1", "c0"}
    assert abs(len(own) - 300) < 4 * math.sqrt(400 * 3 / 4 / 4)
    for start in (1, 9, 57):
        assert mixed_domains(domains, 60 - start, start=start) == texts[start:60]


def test_an_epoch_of_domains_is_as_many_prompts_as_they_have_rows(domains: list[str]):
    options = PromptOptions(domain_weights={"math": 1.0, "code": 1.0}, epochs=2)
    assert len(list(open_prompts(domains, options))) == 6


def test_a_domain_without_rows_is_refused(domains: list[str]):
    options = PromptOptions(domain_weights={"math": 1.0, "logic": 1.0})
    with pytest.raises(SettingsError, match="no row has the domain logic in 'domain', only: None, code, math"):
        next(open_prompts(domains, options))


def test_the_key_of_the_domain_is_a_setting(domains: list[str]):
    options = PromptOptions(domain_weights={"m0": 1.0}, domain_key="prompt")
    assert [prompt.text for prompt in open_prompts(domains, options)] == ["m0"]
