"""Every definition says where it comes from, and some test has its numbers."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slimectl import algorithms

OURS = {
    "BatchingOptions": "a record of settings",
    "ScoringPass": "a record",
    "PrefixTrie": "a record",
    "Chunks": "a division into chunks",
    "Surrogate": "an interface",
    "BoundedSurrogate": "two bounds",
    "Algorithm": "an entry of the registry",
    "TokenRows": "a record",
    "TrainingBatch": "a record",
    "LinearizedLoss": "the chain rule",
    "WatchedLoss": "a loss of the user with the metrics of PolicyLoss, which cites",
    "build_tries": "our own sharing of prefixes; its intervals cite",
    "environment_metrics": "means and counts",
    "check_tokens": "a check of shapes",
    "mask_of": "a column",
    "count_failures": "a count",
    "agent_metrics": "means and counts",
    "mean_and_spread": "a mean, a deviation and bounds",
    "standard_deviation": "a deviation",
    "quantiles": "percentiles",
    "zero_std_groups": "a count",
    "assign_to_ranks": "karmarkar_karp has the method",
    "group_advantages": "puts together functions that cite",
    "attempt_rewards": "a mean by attempt",
    "moments_of": "RewardMoments cites",
    "share_beyond": "a share",
    "with_remainder": "a sum of probabilities",
    "reference_and_teacher": "a choice of passes",
    "normalize_rewards": "puts together functions that cite",
    "plan_batches": "puts together functions that cite",
    "policy_loss": "fills PolicyLoss, which cites, from settings",
    "pass_k_values": "the k that are reported",
    "preference_pairs": "a choice of pairs, not an estimate",
    "rollout_metrics": "counts and means",
    "response_metrics": "counts, and functions that cite",
    "correlation_within": "Pearson's correlation",
    "round_robin": "a way of dealing",
    "causal_convolution": "a convolution",
    "l2_normalize": "a Euclidean norm",
    "row_means": "a mean",
    "pack_by_length": "next fit by length",
    "tokens_of": "a count",
}
"""What has no paper behind it, and why."""

SOURCE = re.compile(r"arXiv:\d{4}\.\d{5}|doi:10\.|[A-Z]\w+ (et al\. |& [A-Z]\w+ |team )?(19|20)\d\d\b")
"""An article by its number, or authors and a year."""

HAND_WRITTEN = [
    path
    for path in Path(__file__).parent.glob("test_*.py")
    if path.name not in ("test_against_plain.py", Path(__file__).name)
]


def public() -> Iterator[tuple[str, Any]]:
    for module in pkgutil.iter_modules(algorithms.__path__):
        found = importlib.import_module(f"{algorithms.__name__}.{module.name}")
        for name, thing in vars(found).items():
            defined = getattr(thing, "__module__", None) == found.__name__
            if defined and not name.startswith("_") and (inspect.isfunction(thing) or inspect.isclass(thing)):
                yield name, thing


PUBLIC = dict(public())


@pytest.mark.parametrize("name", PUBLIC)
def test_it_has_words_and_a_source_or_a_reason_to_have_none(name: str):
    words = inspect.getdoc(PUBLIC[name]) or ""
    assert len(words.split()) > 3
    assert bool(SOURCE.search(words)) != (name in OURS)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_test_with_numbers_by_hand_names_it(name: str):
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in HAND_WRITTEN)


def test_the_list_of_what_is_ours_has_nothing_that_is_gone():
    assert set(OURS) - set(PUBLIC) == set()
