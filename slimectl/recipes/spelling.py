"""Prompts for spelling words backward: reasoning-gym's task in a short form, with held-out words for evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from slimectl.errors import SettingsError, requiring

TASK = "spell_backward"
HELD_OUT_OF = 5
"""One word in this many is held out, by a hash of the word, so that no seed uses it for training."""


def prompts(
    split: str = "train", seed: int = 0, size: int = 1000, min_word_len: int = 3, max_word_len: int = 5
) -> Iterator[dict[str, Any]]:
    """Yield `size` prompts `word>`, with the reversed word as label. They are graded by reasoning-gym's scorer.

    Raises SettingsError for a split other than train and held_out.
    """
    if split not in ("train", "held_out"):
        raise SettingsError(f"spelling: split={split!r} is neither train nor held_out")
    entries = _entries(seed, 20 * size, min_word_len, max_word_len)
    count = 0
    for i in range(len(entries)):
        entry = entries[i]
        word = entry["metadata"]["word"]
        if is_held_out(word) != (split == "held_out"):
            continue
        metadata = {"source_dataset": TASK, "rm_type": "reasoning_gym"}
        short_entry = {"question": entry["question"], "answer": entry["answer"], "metadata": {"word": word}}
        yield {"prompt": f"{word}>", "label": entry["answer"], "metadata": {**metadata, "entry": short_entry}}
        count += 1
        if count == size:
            return


@lru_cache(maxsize=8)
def _entries(seed: int, size: int, min_word_len: int, max_word_len: int) -> Any:
    """Return reasoning-gym's entries by index. They are cached, because creating them reads and splits a list of words.

    A run opens its prompts once per evaluation.
    """
    with requiring("reasoning-gym", extra="quickstart", wanted_by="the spelling task"):
        import reasoning_gym
    return reasoning_gym.create_dataset(
        TASK, seed=seed, size=size, min_word_len=min_word_len, max_word_len=max_word_len
    )


def is_held_out(word: str) -> bool:
    return hashlib.blake2b(word.lower().encode(), digest_size=8).digest()[0] % HELD_OUT_OF == 0
