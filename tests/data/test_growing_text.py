"""The text of a growing answer: a beginning of the whole text at every token, whatever its bytes are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from slimectl.checkpoints.create import byte_tokenizer
from slimectl.data.growing_text import UNFINISHED, GrowingText, before_stop

BYTE_LEVEL = byte_tokenizer().backend_tokenizer


def byte_fallback() -> Any:
    """A tokenizer as Llama 2's: pieces with blanks, and a token for each byte that no piece has."""
    pieces = ["<unk>", "▁a", "▁b", "c", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


BYTE_FALLBACK = byte_fallback()
CHARACTERS = st.text(st.sampled_from("aé€😀 "), max_size=3).map(lambda text: list(text.encode()))
BYTES = st.lists(st.one_of(CHARACTERS, st.lists(st.integers(120, 255), max_size=3)), max_size=8).map(
    lambda parts: [byte for part in parts for byte in part]
)


def readings(backend: Any, tokens: list[int], steps: list[int]) -> list[str]:
    """The text after every few tokens, and at the end."""
    growing, texts, count = GrowingText(backend), [], 0
    for step in steps:
        count += step
        texts.append(growing.read(tokens[:count]))
    return [*texts, growing.read(tokens)]


@given(data=st.data(), steps=st.lists(st.integers(0, 4), max_size=30))
@settings(max_examples=60)
def test_more_tokens_only_add_to_the_text(data: st.DataObject, steps: list[int]):
    raw = data.draw(BYTES)
    special = data.draw(st.lists(st.integers(0, 24), max_size=2))
    for backend, tokens in (
        (BYTE_LEVEL, [BYTE_LEVEL.get_vocab_size() - 1 if i in special else byte for i, byte in enumerate(raw)]),
        (BYTE_FALLBACK, [1 + i % 4 if i in special else 5 + byte for i, byte in enumerate(raw)]),
    ):
        whole = backend.decode(tokens)
        texts = [*readings(backend, tokens, steps), whole]
        assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))
        if tokens and not whole.endswith(UNFINISHED) and tokens[-1] < 5:
            assert texts[-2] == whole


def test_only_the_beginning_of_a_character_is_held_back():
    euro = list("a€b".encode())
    assert [GrowingText(BYTE_LEVEL).read(euro[:count]) for count in range(6)] == ["", "a", "a", "a", "a€", "a€b"]
    # A broken character cannot be mended any more once another one follows.
    assert GrowingText(BYTE_LEVEL).read([0xE2, 0xE2]) == UNFINISHED
    accent = [5 + byte for byte in "é".encode()]
    # A run of byte tokens is judged as a whole: with 0xFF behind it, é is no character either.
    assert [GrowingText(BYTE_FALLBACK).read([1, *accent, *more]) for more in ([], [5 + 0xFF], [3])] == ["", "", "aéc"]


def test_a_text_ends_before_a_stop_string_and_before_its_beginning():
    assert before_stop("one two", ["tw", "one t"]) == ""
    assert before_stop("a\nUse", ["\nUser:", "b"]) == "a"
    assert before_stop("a\nUse it", ["\nUser:"]) == "a\nUse it"
