"""Words to spell backward: the same for the same seed, held out by the word, and read once."""

from __future__ import annotations

from slimectl.recipes import spelling


def test_prompts_repeat_and_no_held_out_word_is_trained_on():
    trained, held_out = (
        [*spelling.prompts(split, seed=4, size=200, max_word_len=4)] for split in ("train", "held_out")
    )
    assert [*spelling.prompts("train", seed=4, size=200, max_word_len=4)] == trained
    words = {row["prompt"].removesuffix(">").lower() for row in trained}
    assert not words & {row["prompt"].removesuffix(">").lower() for row in held_out}
    assert all(row["label"] == row["prompt"].removesuffix(">")[::-1] for row in [*trained, *held_out])
    assert {3, 4} == {len(row["label"]) for row in trained}


def test_the_words_of_a_source_are_read_once():
    next(spelling.prompts(seed=5, size=10))
    before = spelling._entries.cache_info()
    next(spelling.prompts(seed=5, size=10))
    after = spelling._entries.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)
