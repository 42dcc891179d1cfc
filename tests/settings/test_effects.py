"""Every setting does something: it changes what some part of slimectl does, or it is refused."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES, SHAPE
from settings.effect_rows import ALGORITHM_ROWS, DATASET_ROWS, ROWS, Row
from settings.observed import Workplace, attempts
from workshop import REWARD

from slimectl.checkpoints.create import create_model
from slimectl.runtime.model_functions import Trainer
from slimectl.runtime.stage_functions import load_settings
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.evaluate import Dataset
from slimectl.settings.reference import entries

TESTS = Path(__file__).parents[1]
OWN = (
    REWARD
    + """
def sizes(samples):
    return [float(len(samples))] * len(samples)

def always(sample):
    return 1.0

def silent(sample):
    return None if sample.response == "four" else 1.0

def two(sample):
    return {"high": 1.0, "low": 0.0}

async def generate(sample, sampling_params, generate):
    sample.append_response_tokens([65], log_probs=[-1.0], text="A")
    return sample
"""
)
EXPERTS = {"model_type": "qwen3_moe", "tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "norm_topk_prob": True}  # fmt: skip
STEPS = {"run.rollout_batch_size": 4, "rollout.n_samples_per_prompt": 3, "train.num_steps_per_rollout": 2,
         "train.lr": 0.05, "score.reward_key": "score"}  # fmt: skip
"""Settings of every training: two steps of six answers, so that the policy leaves the one that sampled."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path]) -> Workplace:
    folder = tmp_path_factory.mktemp("effects")
    words = ["one", "two", "three", "four", "five", "six"]
    rows = [
        {"prompt": f"say {word} " + word * i, "label": word, "kind": "even" if i % 2 else "odd", "facts": {"n": i},
         "instruments": [{"name": word}], "metadata": {"kind": word[0]}}
        for i, word in enumerate(words)
    ]  # fmt: skip
    for name, some in (("prompts", rows), ("other", rows[::-1])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (folder / "own.py").write_text(OWN)
    create_model(SHAPE | FAMILIES["llama"], folder / "other", seed=8)
    with (folder / "other" / "chat_template.jinja").open("a") as template:
        template.write("{% if loud %}!{% endif %}")
    create_model(SHAPE | EXPERTS, folder / "experts", seed=9)
    tuning = load_settings(None, {**STEPS, "model.path": str(model_dir("llama")), "train.lora_rank": 2})
    with Trainer(tuning) as tuned:
        assert len(list(tuned.train(attempts()))) == 2
        tuned.save(folder / "tuned")
    return Workplace(folder, model_dir("llama"))


def filled(value: Any, place: Workplace) -> Any:
    """The value with the places of this session's files."""
    if isinstance(value, str):
        return value.replace("{folder}", str(place.folder)).replace("{model}", str(place.model))
    if isinstance(value, list):
        return [filled(each, place) for each in value]
    return {key: filled(each, place) for key, each in value.items()} if isinstance(value, dict) else value


def check(place: Workplace, key: str, row: Row, beside: dict[str, Any]) -> None:
    """Compare what is observed with and without the value; without it nothing may be refused."""
    beside = filled(beside | row.beside, place)
    plain = place.observe(row.observation, beside)
    changed = place.observe(row.observation, beside | {key: filled(row.value, place)})
    if not row.words:
        assert not any("refused: " in lines[0] for lines in (plain, changed)), (plain, changed)
        assert changed != plain
    else:
        blocked, free = (plain, changed) if row.unlocks else (changed, plain)
        assert blocked[0].startswith("refused: ")
        assert row.words in blocked[0]
        assert row.words not in free[0]


def test_every_setting_has_a_row():
    """A new setting needs a line in effect_rows.py: a value, and where its effect is seen."""
    keys = [entry.key for entry in entries() if entry.key.count(".") == 1]
    assert sorted({key for key in keys if not key.startswith("algorithm.")}) == sorted(ROWS)
    assert sorted(Dataset.model_fields) == sorted(DATASET_ROWS)
    fields = {key for algorithm in ALGORITHMS.values() for key in algorithm.model_fields}
    assert sorted(fields - {"name"}) == sorted(ALGORITHM_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key, row in ROWS.items() if row.observation])
def test_a_setting_changes_what_is_observed(place: Workplace, key: str):
    row = ROWS[key]
    check(place, key, row, STEPS if "num_steps_per_rollout" not in key and row.observation is not None else {})


@pytest.mark.slow
@pytest.mark.parametrize("key", DATASET_ROWS)
def test_a_setting_of_a_dataset_changes_its_metrics(place: Workplace, key: str):
    check(place, "eval.data", DATASET_ROWS[key], {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_setting_of_an_algorithm_changes_what_is_learnt_or_is_refused(place: Workplace, name: str):
    algorithm, idle = ALGORITHMS[name], []
    for key, field in algorithm.model_fields.items():
        row = ALGORITHM_ROWS.get(key, Row())
        if row.observation is None:
            continue
        given = {"algorithm.gdpo_weights": {"score": 1.0}} if name == "gdpo" else {}
        settings = filled(STEPS | given | _known(row, algorithm) | {"algorithm.name": name}, place)
        value = not field.default if row.value == "other" or row.value is field.default else row.value
        plain = place.observe(row.observation, settings)
        changed = place.observe(row.observation, settings | {f"algorithm.{key}": filled(value, place)})
        assert not plain[0].startswith("refused: "), (key, plain)
        if changed == plain and not changed[0].startswith(f"refused: algorithm.{key}"):
            idle.append(key)
    assert idle == []


def _known(row: Row, algorithm: Any) -> dict[str, Any]:
    """The settings beside a value, without those that the algorithm does not have."""
    lacking = [name for name in row.beside if name.startswith("algorithm.") and name[10:] not in algorithm.model_fields]
    return {name: value for name, value in row.beside.items() if name not in lacking}


@pytest.mark.parametrize(
    "key", [key for rows in (ROWS, ALGORITHM_ROWS) for key, row in rows.items() if row.test]
)  # fmt: skip
def test_the_effect_that_is_seen_elsewhere_has_its_test(key: str):
    row = ROWS.get(key) or ALGORITHM_ROWS[key]
    file, _, name = row.test.partition("::")
    source = (TESTS / file).read_text()
    names = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert any(each.startswith(name or "test_") for each in names)
    assert (row.words or key.rpartition(".")[2]) in source
