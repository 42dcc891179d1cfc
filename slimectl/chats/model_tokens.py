"""Finds the tokens that end a model's responses, and tokens without an embedding."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimectl.chats.template import Template
from slimectl.errors import RecordError, SettingsError
from slimectl.system.model_files import MAX_CONFIG_BYTES, end_token_ids, read_json
from slimectl.system.stdio import logger
from slimectl.types import Chat, Prompt

GENERATION_CONFIG = "generation_config.json"
QUESTION, ANSWER = "q0questionq", "q1answerq"
CALL = {"type": "function", "id": "call00001", "function": {"name": "lookup", "arguments": {"word": ANSWER}}}
NAMED = 5
"""Number of tokens that a message lists."""


def missing_ends(tokenizer: Any, end_tokens: Collection[int]) -> list[int]:
    """Return the tokens with which the chat template ends turns, if it ends none with one of the `end_tokens`.

    They are added tokens, because text can contain any other token. A template that only starts the next turn ends a
    turn with the token of the next role. Returns [] without a template.
    """
    if not getattr(tokenizer, "chat_template", None):
        return []
    question, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    try:
        ends = _ends_of_answer(Template(tokenizer, Prompt(text=""), None), tokenizer, [question, answer])
        if not ends or any(token in end_tokens for token in ends):
            return []
    except (RecordError, SettingsError):  # reported when a row is rendered
        return []
    missing = ends[-1:]
    with suppress(RecordError, SettingsError):  # a template without calls
        chat: Chat = [question, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        template = Template(tokenizer, Prompt(text=""), None)
        tail = _added(tokenizer, template.text(template.fit(chat)).rpartition(ANSWER)[2])
        # Marks such as </tool_call> precede the end of the turn.
        missing += [token for token in tail if tokenizer.added_tokens_decoder[token].special][-1:]
    return [*dict.fromkeys(token for token in missing if token not in end_tokens)]


def _ends_of_answer(template: Template, tokenizer: Any, chat: Chat) -> list[int]:
    """Return the added tokens that directly follow the answer that ends a chat, else the token of the next role."""
    fitted = template.fit(chat)
    tail = template.text(fitted).rpartition(ANSWER)[2]
    if tail.strip():
        return _added(tokenizer, tail, adjacent=True)
    followed = template.text(template.fit([*chat, chat[0]]))
    role = _added(tokenizer, followed.rpartition(ANSWER)[2], adjacent=True)[:1]
    header = template.text(fitted[:1], header=True).rpartition(QUESTION)[2]
    return role if role and role != _added(tokenizer, header, adjacent=True)[:1] else []


def _added(tokenizer: Any, text: str, *, adjacent: bool = False) -> list[int]:
    """Return the added tokens of a text. If `adjacent`, return only those at its start."""
    tokens, added = tokenizer.encode(text.lstrip(), add_special_tokens=False), tokenizer.added_tokens_decoder
    if adjacent:
        return [*itertools.takewhile(lambda token: token in added, tokens)]
    return [token for token in tokens if token in added]


def end_tokens(folder: Path, tokenizer: Any) -> list[int]:
    """Return the tokens at which engines end a response: the end tokens of the model's files, and `template_ends`.

    The latter are logged once.
    """
    missing = template_ends(folder, tokenizer)
    if missing:
        _announce_ends(str(folder), " and ".join(tokenizer.convert_ids_to_tokens(missing)))
    return [*dict.fromkeys([*_listed_ends(folder, tokenizer), *missing])]


@functools.lru_cache(maxsize=4)  # supervised training asks for every row
def template_ends(folder: Path, tokenizer: Any) -> list[int]:
    """Return the tokens with which the chat template ends turns, if no file of the model lists one of them.

    That is the case for a base model with the template of its instruct model.
    """
    size = vocabulary_size(folder)
    missing = missing_ends(tokenizer, _listed_ends(folder, tokenizer))
    return [token for token in missing if size is None or token < size]


def _listed_ends(folder: Path, tokenizer: Any) -> list[int]:
    """Return the end tokens of config.json, generation_config.json and the tokenizer."""
    return end_token_ids(folder) + ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])


@functools.cache
def _announce_ends(folder: str, names: str) -> None:
    logger.warning(
        f"{folder}: the chat template ends a turn with {names}, which is not an end token in the model's files. "
        f"Responses also end there, and {GENERATION_CONFIG} of a trained model will list it."
    )


def write_end_tokens(folder: Path, tokens: Iterable[int]) -> None:
    """Add end tokens to the generation_config.json of a model, so that every engine stops at them."""
    file = folder / GENERATION_CONFIG
    known = end_token_ids(folder)
    if file.exists():
        values = read_json(file, max_bytes=MAX_CONFIG_BYTES)
    else:
        config = read_json(folder / "config.json", max_bytes=MAX_CONFIG_BYTES)
        names = ("bos_token_id", "pad_token_id")
        values = {name: config[name] for name in names if config.get(name) is not None}
    ends = [*dict.fromkeys([*known, *tokens])]
    file.write_text(json.dumps({**values, "eos_token_id": ends}, indent=2) + "\n", encoding="utf-8")


@functools.lru_cache(maxsize=64)
def vocabulary_size(folder: Path) -> int | None:
    """Return the number of rows of a model's embedding, or None for a folder without a config.json."""
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json", max_bytes=MAX_CONFIG_BYTES)
    text_config = config.get("text_config")
    size = (text_config if isinstance(text_config, dict) else config).get("vocab_size", config.get("vocab_size"))
    return size if isinstance(size, int) else None


def unknown_token(tokens: Collection[int], tokenizer: Any, vocabulary: int | None = None) -> str:
    """Return which of the tokens has no embedding, as the reason to leave out a row, or "" if all have one.

    Without `vocabulary`, the size is taken from the model in the tokenizer's folder.
    """
    if vocabulary is None:
        vocabulary = vocabulary_size(Path(str(getattr(tokenizer, "name_or_path", "") or "/")))
    highest = max(tokens, default=0)
    if vocabulary is None or highest < vocabulary:
        return ""
    name = tokenizer.convert_ids_to_tokens(highest)
    return f"token {highest}{'' if name is None else f' ({name!r})'} is not in the model's vocabulary of {vocabulary}"


def unknown_tokens(folder: Path, tokenizer: Any) -> str:
    """Return a warning about tokens that texts can contain but that have no embedding, or "" if there are none."""
    size = vocabulary_size(folder)
    if size is None or len(tokenizer) <= size:
        return ""
    names = {token: name for name, token in tokenizer.get_vocab().items() if token >= size}
    added = tokenizer.added_tokens_decoder
    possible = [t for t in sorted(names) if t not in added or t in tokenizer.encode(names[t], add_special_tokens=False)]
    if not possible:
        return ""
    listed = ", ".join(f"{names[token]!r} ({token})" for token in possible[:NAMED])
    more = "" if len(possible) <= NAMED else f" and {len(possible) - NAMED} more"
    return (
        f"{folder}: its tokenizer has tokens without an embedding in the model: {listed}{more}. The vocabulary has "
        f"{size} tokens. Rows with such a token are left out."
    )
