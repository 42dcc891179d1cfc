"""Recognizes prompt and answer in rows of the formats in which datasets are published."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slimectl.chats.messages import content_text, from_json
from slimectl.data.checks import a_chat, shown
from slimectl.data.prompt_images import OTHER_MEDIA
from slimectl.errors import RecordError
from slimectl.system.stdio import logger
from slimectl.types import Chat, column, text_of_label

if TYPE_CHECKING:
    from slimectl.data.sources import NamedTables

INPUT_KEY, LABEL_KEY, IMAGE_KEY = "prompt", "label", "images"
ANSWERS = (
    "reward_model.ground_truth", "ground_truth", "answer", "completion", "solution", "response", "output", "target",
)  # fmt: skip
"""Answer columns to use if there is no label column, by priority: what a verifier compares with."""
IMITATED = (
    "completion", "response", "output", "solution", "answer", "target", "ground_truth", "reward_model.ground_truth",
)  # fmt: skip
"""The same columns by priority for a demonstration: the whole answer before its final result."""
IMAGES = (
    IMAGE_KEY, "image", "image_paths", "image_path", "image_files", "image_file", "image_urls", "image_url",
    "imgs", "img", "img_paths", "img_path", "pictures", "picture",
)  # fmt: skip
"""Columns of images, by priority."""
NUMBERED_IMAGE = re.compile(r"(image|img|picture)_?\d+")
QUESTIONS = ("question", "problem", "query", "instruction", "input", "text")
"""Columns of prompts that are strings, by priority."""
SYSTEM = ("system", "system_prompt")
"""Columns of system messages, by priority."""
GSM8K = "####"
"""Marker between the reasoning steps and the final number of an answer in GSM8K."""
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "assistant": "assistant", "model": "assistant", "function_call": "assistant", "tool_call": "assistant",
    "system": "system", "developer": "developer", "tool": "tool", "observation": "tool", "function_response": "tool",
    "tool_response": "tool",
}  # fmt: skip
"""Chat-template role of each ShareGPT speaker."""
SPEAKERS = ("human", "gpt", "chatgpt")
"""ShareGPT speakers that are not roles of any chat template."""
CHAT_TEXT = re.compile(r"""\s*\[\s*\{\s*"(role|content|from|value)"\s*:""")
"""Start of a chat stored as JSON text."""
CALLERS = ("function_call", "tool_call")
"""ShareGPT's speakers whose text is tool calls as JSON."""

_announced: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class PromptOptions:
    """Which rows of prompt sources are read, in which order, and from which columns.

    A dotted column name is a path into objects: `reward_model.ground_truth`. With the default names, rows of other
    published formats are recognized.
    """

    input_key: str = INPUT_KEY
    label_key: str = LABEL_KEY
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    image_key: str = IMAGE_KEY
    reads_images: bool = False
    """Whether every image mark in a text needs an image in the row, because the model reads images."""
    demonstrations: bool = False
    """Whether chats stay whole, including the assistant's responses."""
    shuffle_seed: int | None = None
    """Shuffles each epoch differently. Only positions are held in memory."""
    weights: Sequence[float] | None = None
    """One per source: each prompt comes from a source drawn by weight with `mix_seed`. Every source repeats its rows
    endlessly. An epoch has as many prompts as all sources have rows."""
    domain_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each domain: each prompt comes from a domain drawn like a source of `weights`. Rows of other domains
    are left out."""
    domain_key: str = "domain"
    mix_seed: int = 0
    epochs: int | None = 1
    """None: endlessly."""
    start: int = 0
    """Number of the first prompt. The prompt at occurrence `i` does not depend on it."""
    named: NamedTables | None = None
    """Opens sources by their names in the settings."""


@dataclass(frozen=True)
class Columns:
    """Prompt and label of one row. `names` are the columns used for them, which its samples need not keep."""

    text: Any
    label: Any
    names: tuple[str, ...]


def has_column(row: Mapping[str, Any], key: str) -> bool:
    """Whether a row has a column of this name, or an object at this dotted path."""
    head, dot, rest = key.partition(".")
    return key in row or (bool(dot) and isinstance(row.get(head), dict) and has_column(row[head], rest))


def read_columns(row: Mapping[str, Any], options: PromptOptions, location: str) -> Columns:
    """Return prompt and label of a row, from the columns in `options` or from a known format.

    In demonstrations a chat stays whole. Otherwise its last assistant turn is the label. Raises RecordError if a
    column given in the settings is missing, or if the format is unknown.
    """
    columns = _read_columns(row, options, location)
    return with_context(row, columns, location)


def with_context(row: Mapping[str, Any], columns: Columns, location: str) -> Columns:
    """Return the columns with the row's system message and `history` before the prompt. Raises RecordError."""
    if not columns.text or not isinstance(columns.text, str | list):
        return columns
    name = next((name for name in SYSTEM if isinstance(row.get(name), str) and row[name]), "")
    system: Chat = [{"role": "system", "content": row[name]}] if name and name not in columns.names else []
    history = [] if "history" in columns.names else _history(row.get("history"), f"{location}: history")
    chat: Chat = [{"role": "user", "content": columns.text}] if isinstance(columns.text, str) else list(columns.text)
    names = [source for source, messages in ((name, system), ("history", history)) if messages]
    if not names or (chat[:1] == system and not history):
        return columns
    later = [*(history[:1] if system else ()), *chat[:1]]
    if any(isinstance(message, dict) and message.get("role") == "system" for message in later):
        raise RecordError(f"{location}: {names[0]}: the chat also begins with a system message. Remove one of them.")
    _announce(location, f"the prompt begins with {' and '.join(names)}", "rollout.input_key")
    return Columns([*system, *history, *chat], columns.label, (*columns.names, *names))


def _history(value: Any, location: str) -> Chat:
    """Return the turns before a prompt: pairs of question and answer, or messages. Other values give none.

    Raises RecordError for pairs and objects that are neither.
    """
    value = from_json(value)
    if not isinstance(value, list) or not any(isinstance(item, list | dict) for item in value):
        return []
    if all(isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in value):
        roles = ("user", "assistant")
        return [{"role": role, "content": text} for pair in value for role, text in zip(roles, pair, strict=True)]
    if all(isinstance(item, dict) and item.keys() & {"role", "from"} for item in value):
        return _checked_chat(value, location)
    raise RecordError(
        f"{location}: expected pairs [question, answer] or messages. If the column holds neither, rename it."
    )


def _read_columns(row: Mapping[str, Any], options: PromptOptions, location: str) -> Columns:
    demonstration = options.demonstrations
    label_key = _label_key(row, options, location, IMITATED if demonstration else ANSWERS)
    if has_column(row, options.input_key):
        text = as_messages(column(row, options.input_key), f"{location}: {options.input_key}")
        if options.input_key == INPUT_KEY and label_key == "completion":
            return _completed(row, text, location, demonstration)
        names = (options.input_key, options.label_key)
        if label_key not in (None, options.label_key):
            _announce(location, f"the label is taken from {label_key}", "rollout.label_key")
        return Columns(text, column(row, label_key) if label_key else None, names)
    if options.input_key != INPUT_KEY:
        raise missing_column(location, options.input_key, row, "rollout.input_key", "--input-key")
    if name := chat_column(row):
        return _chat(row, name, label_key, location, demonstration)
    question = next((name for name in QUESTIONS if isinstance(row.get(name), str) and row[name]), None)
    if question is None:
        raise missing_column(location, options.input_key, row, "rollout.input_key", "--input-key")
    return _question(row, question, label_key, options, location)


def image_column(row: Mapping[str, Any], key: str, location: str) -> str:
    """Return the name of the image column: `key` from the settings, or the first of `IMAGES` that has some.

    Raises RecordError for columns that are not read: videos, audio, and images in several columns.
    """
    filled = [str(name) for name, value in row.items() if value not in (None, "", [], {}, ())]
    if others := unread_media(row, key):
        raise RecordError(
            f"{location}: {others[0]}: only images are supported. Give the frames of a video as images, or remove the "
            "row or the column."
        )
    if key != IMAGE_KEY or key in filled:
        return key
    if numbered := sorted(filter(NUMBERED_IMAGE.fullmatch, filled)):
        raise RecordError(f"{location}: {', '.join(numbered)}: put the images of a row into one list, {key}.")
    name = next((name for name in IMAGES if name in filled), key)
    if name != key:
        _announce(location, f"the images are taken from {name}", "rollout.image_key")
    return name


def unread_media(row: Mapping[str, Any], key: str) -> list[str]:
    """Return the names of filled columns of videos and audio, except the column `key`."""
    names = (name for name, value in row.items() if value not in (None, "", [], {}, ()))
    return sorted(str(name) for name in names if name != key and OTHER_MEDIA.fullmatch(str(name)))


def warn_of_media(row: Mapping[str, Any], key: str, location: str) -> None:
    """Log once for each source that a text model does not get the videos and audio of its rows."""
    for name in unread_media(row, key):
        if source := _first_time(location, name):
            logger.warning(f"{source}: {name}: is ignored. The model sees only the text of the prompt.")


def chat_column(row: Mapping[str, Any]) -> str | None:
    """Return the name of the column that holds a whole chat in a published format, or None."""
    names = ("messages", "conversations", "conversation")
    return next((name for name in names if isinstance(_parsed_chat(row.get(name)), list)), None)


def _parsed_chat(value: Any) -> Any:
    """Parse a chat that a table stores as JSON text, and return any other value unchanged."""
    if not isinstance(value, str) or not CHAT_TEXT.match(value):
        return value
    chat = from_json(value)
    return chat if isinstance(chat, list) and all(isinstance(message, dict) for message in chat) else value


def as_messages(value: Any, location: str) -> Any:
    """Return a chat, one message, a chat as JSON text, or a ShareGPT chat as a list of messages.

    Any other value is returned unchanged. Raises RecordError for an unknown speaker.
    """
    value = _parsed_chat(value)
    messages = [value] if isinstance(value, dict) and value.keys() & {"role", "from"} else value
    if not isinstance(messages, list):
        return value
    return [_message(m, location) for m in messages] if any(map(_is_sharegpt, messages)) else messages


def _is_sharegpt(message: Any) -> bool:
    return isinstance(message, dict) and (
        "from" in message or message.get("role") in SPEAKERS or ("value" in message and "content" not in message)
    )


def _checked_chat(value: Any, location: str) -> Chat:
    messages = as_messages(value, location)
    try:
        a_chat(messages)
    except ValueError as error:
        raise RecordError(f"{location}: {error}") from None
    return messages  # type: ignore[no-any-return]


def missing_column(location: str, key: str, row: Mapping[str, Any], setting: str, flag: str) -> RecordError:
    """Return the error for a missing column, with a list of the row's columns."""
    names = ", ".join(_paths(row)) or "none"
    return RecordError(f"{location}: no key {key!r}. Its keys are {names}. Choose one with {flag} or {setting}.")


def _paths(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's columns. For an object, return the dotted names of its entries."""
    return [
        path
        for name, value in row.items()
        for path in ([f"{name}.{key}" for key in value] if isinstance(value, dict) and value else [str(name)])
    ]


def _label_key(row: Mapping[str, Any], options: PromptOptions, location: str, answers: Sequence[str]) -> str | None:
    """Return the name of the label column: from the settings, or the first of `answers` that the row has."""
    if has_column(row, options.label_key):
        return options.label_key
    if options.label_key != LABEL_KEY:
        raise missing_column(location, options.label_key, row, "rollout.label_key", "--label-key")
    return next((name for name in answers if column(row, name) is not None), None)


def _question(
    row: Mapping[str, Any], name: str, label_key: str | None, options: PromptOptions, location: str
) -> Columns:
    text, names = row[name], [name]
    if name == "instruction" and "input" in row:  # alpaca: the input, if any, is what the instruction is about
        more = row["input"]
        text, names = f"{text}\n\n{text_of_label(more)}" if more else text, [name, "input"]
    if name == "text" and label_key is None and options.demonstrations:
        _announce(location, "the whole column text is trained on", "rollout.input_key")
        return Columns("", text, (name,))
    label, part = column(row, label_key) if label_key else None, ""
    if label_key == "answer" and isinstance(label, str) and GSM8K in label and not options.demonstrations:
        label, part = label.rpartition(GSM8K)[2].strip(), f" after {GSM8K}"
    source = " and ".join(names)
    answer = f", the label from {label_key}{part}" if label_key else ", and there is no label"
    _announce(location, f"the prompt is taken from {source}{answer}", "rollout.input_key and rollout.label_key")
    return Columns(text, label, (*names, options.label_key))


def _chat(row: Mapping[str, Any], name: str, label_key: str | None, location: str, demonstration: bool) -> Columns:
    chat = _checked_chat(row[name], f"{location}: {name}")
    if demonstration and chat and chat[-1]["role"] == "assistant":
        unused = "" if label_key is None else f", and {label_key} is not"
        _announce(location, f"the assistant turns in {name} are trained on{unused}", "rollout.input_key")
        return Columns(chat, None, (name,))
    prompt, answer = _without_answer(chat)
    label, source = (answer, "its last turn") if label_key is None else (column(row, label_key), label_key)
    used = f", the label from {source}" if label is not None else ", and there is no label"
    _announce(location, f"the prompt is taken from {name}{used}", "rollout.input_key and rollout.label_key")
    return Columns(prompt, label, (name, LABEL_KEY))


def _completed(row: Mapping[str, Any], text: Any, location: str, demonstration: bool) -> Columns:
    """Return prompt and completion of one row, strings or chats."""
    completion, names = as_messages(row["completion"], f"{location}: completion"), (INPUT_KEY, "completion")
    _announce(location, "the label is taken from completion", "rollout.label_key")
    if not isinstance(completion, list):
        return Columns(text, completion, names)
    answer = _checked_chat(completion, f"{location}: completion")
    if demonstration:
        prompt = [{"role": "user", "content": text}] if isinstance(text, str) else list(text or [])
        return Columns([*prompt, *answer], None, names)
    return Columns(text, _without_answer(answer)[1], names)


def _without_answer(chat: Chat) -> tuple[Chat, str | None]:
    """Split off the text of the last turn if it is the assistant's. Otherwise return the whole chat."""
    if not chat or chat[-1]["role"] != "assistant":
        return chat, None
    content = chat[-1].get("content")
    text = content_text(content)
    return chat[:-1], None if content is None or (text == "" and chat[-1].get("tool_calls")) else text


def _message(message: Any, location: str) -> Any:
    """Return a ShareGPT message {from, value} as {role, content}. Raises RecordError."""
    speaker = message.get("from", message.get("role")) if isinstance(message, dict) else None
    if speaker is None:
        return message
    role = ROLES.get(str(speaker).lower())
    if role is None:
        raise RecordError(f"{location}: unknown speaker {speaker!r}. Known speakers: {', '.join(ROLES)}.")
    content = message.get("value", message.get("content"))
    more = {key: value for key, value in message.items() if key not in ("from", "role", "value", "content")}
    if str(speaker).lower() in CALLERS:
        return {**more, "role": role, "content": "", "tool_calls": _calls(content, location)}
    return {**more, "role": role, "content": content}


def _calls(value: Any, location: str) -> list[dict[str, Any]]:
    """Return the calls in the JSON of a ShareGPT message: an object with name and arguments, or a list of them."""
    calls = from_json(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RecordError(f"{location}: function_call: expected JSON with name and arguments, got {shown(value)}")
    return [{"type": "function", "function": call} for call in calls]


def _announce(location: str, message: str, settings: str) -> None:
    """Log once for each source how its columns are used."""
    if source := _first_time(location, message):
        logger.info(f"{source}: {message}. Set {settings} to use other columns.")


def _first_time(location: str, message: str) -> str | None:
    """Return the source of a location the first time that it gets this message, otherwise None."""
    source = re.sub(r"(:\d+|\[\d+\])$", "", location)
    if (source, message) in _announced:
        return None
    _announced.add((source, message))
    return source
