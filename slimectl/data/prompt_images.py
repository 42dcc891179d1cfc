"""Images in prompt rows: an image column, marks in texts, message parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimectl.chats.messages import IMAGE_MARK, IMAGE_PARTS
from slimectl.data.images import image_source
from slimectl.types import Chat, ImageSource, Sample

OTHER_MARKS = ("<video>", "<audio>", "<|image_pad|>", "<|video_pad|>")
"""Marks of unsupported media, and placeholder tokens that a text must not contain."""
OTHER_MEDIA = re.compile(r"(videos?|audios?|input_audio)(_(paths?|files?|urls?))?")
"""Unsupported column names and message part types."""
PART: dict[str, Any] = {"type": "image"}
"""An image in the chat of a Prompt. Its source is in the prompt's `images`."""


def folder_of(location: str) -> Path:
    """Return the folder of the file in a row's location (FILE:LINE, FILE[ROW]), or the current folder otherwise."""
    file = Path(re.sub(r"(:\d+|\[\d+\])$", "", location))
    return file.parent if file.exists() else Path()


def has_images(text: str | Chat) -> bool:
    """Return whether a chat has parts that are images."""
    return isinstance(text, list) and any(_is_image(part) for message in text for part in _parts(message))


def has_places(text: str | Chat) -> bool:
    """Return whether a prompt has parts that are images, or marks in its texts."""
    if isinstance(text, str):
        return any(mark in text for mark in (IMAGE_MARK, *OTHER_MARKS))
    return has_images(text) or any(has_places(content) for content in _texts(text) if isinstance(content, str))


def refuse_other_media(text: str | Chat) -> None:
    """Raise ValueError for a part of a message that is a video or audio."""
    for number, message in enumerate(text if isinstance(text, list) else []):
        for part in _parts(message):
            if OTHER_MEDIA.fullmatch(str(part.get("type"))):
                raise ValueError(
                    f"message[{number}].content: has a part of type {part['type']!r}. Only text and images are read. "
                    f"Give frames of a video as images."
                )


def place_images(
    text: str | Chat, column: Any, folder: Path, *, reads_images: bool = False
) -> tuple[str | Chat, list[ImageSource]]:
    """Return a prompt whose images are parts without a source, and the sources in order.

    Sources are in the parts themselves, or in `column`. Images of `column` go to the parts without a source and to the
    marks in the texts. If there are none, they go to the start of the first user message. If `column` has no images,
    marks are plain text, unless the model `reads_images`. Raises ValueError if images and places differ in number.

    >>> place_images("<image>Left or right?", ["/a.png"], Path("/"))
    ([{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'Left or right?'}]}], ['/a.png'])
    """
    given = _listed(column)
    if not given and not has_images(text) and not (reads_images and has_places(text)):
        return text, []
    chat: Chat = [{"role": "user", "content": text}] if isinstance(text, str) else text
    if others := [mark for mark in OTHER_MARKS if any(mark in str(content) for content in _texts(chat))]:
        raise ValueError(
            f"the prompt has {others[0]}. Only images are supported. Mark the place of each with {IMAGE_MARK}."
        )
    if given and not any(IMAGE_MARK in str(content) for content in _texts(chat)) and not has_images(chat):
        chat = _before_question(chat, len(given))
    waiting = iter(given)
    sources: list[ImageSource] = []
    marks = bool(given) or reads_images
    placed = [_placed(message, waiting, sources, folder, marks=marks) for message in chat]
    left = sum(1 for _ in waiting)
    if left:
        raise ValueError(
            f"{len(given)} images, but the prompt has places for {len(given) - left}. Write {IMAGE_MARK} for each."
        )
    return placed, sources


def resolved_inputs(value: Mapping[str, Any] | None, folder: Path) -> dict[str, Any] | None:
    """Return `multimodal_inputs` of a sample with absolute paths. Raises ValueError for anything but images."""
    if not value:
        return None
    others = sorted(value.keys() - {"images"})
    if others:
        raise ValueError(f"{others[0]}: only images are supported")
    if not isinstance(value.get("images"), list):
        raise ValueError("images: expected a list of paths or objects with bytes")
    return {"images": [image_source(image, folder) for image in value["images"]]}


def record_images(record: Mapping[str, Any], folder: Path) -> list[ImageSource]:
    """Return the images of a sample's record, with paths relative to `folder`, or none if it is not valid."""
    value = record.get("multimodal_inputs")
    try:
        return (resolved_inputs(value, folder) or {}).get("images", []) if isinstance(value, dict) else []
    except ValueError:
        return []


def resolve_sample(sample: Sample, location: str) -> None:
    """Make the paths of a sample's images absolute. Raises ValueError."""
    sample.multimodal_inputs = resolved_inputs(sample.multimodal_inputs, folder_of(location))


def _placed(
    message: dict[str, Any], waiting: Iterator[Any], sources: list[ImageSource], folder: Path, *, marks: bool
) -> dict[str, Any]:
    """Return a message whose image parts have no source. The sources are appended to `sources`."""
    content = message.get("content")
    if not isinstance(content, list) and not (isinstance(content, str) and marks and IMAGE_MARK in content):
        return message
    parts: list[dict[str, Any]] = []
    for part in _parts(message):
        if _is_image(part):
            value = _source(part)
            parts.append(PART)
            sources.append(image_source(_next(waiting) if value is None else value, folder))
        elif marks and isinstance(part.get("text"), str):
            for number, piece in enumerate(part["text"].split(IMAGE_MARK)):
                if number:
                    parts.append(PART)
                    sources.append(image_source(_next(waiting), folder))
                if piece:
                    parts.append({"type": "text", "text": piece})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _next(waiting: Iterator[Any]) -> Any:
    value = next(waiting, None)
    if value is None:
        raise ValueError(
            f"the prompt has more places for images than the row has images. Give one for each {IMAGE_MARK}."
        )
    return value


def _listed(column: Any) -> list[Any]:
    """Return the images of a column: a list, one image, or a list as JSON text, as in CSV files."""
    if isinstance(column, str) and column.startswith("["):
        with suppress(ValueError):
            column = json.loads(column)
    if isinstance(column, list | tuple):
        return list(column)
    is_empty = column in (None, "") or (isinstance(column, Mapping) and not any(column.values()))
    return [] if is_empty else [column]


def _before_question(chat: Chat, count: int) -> Chat:
    for number, message in enumerate(chat):
        if message["role"] == "user":
            return [*chat[:number], {**message, "content": [*[PART] * count, *_parts(message)]}, *chat[number + 1 :]]
    raise ValueError(f"{count} images, but no user message. Write {IMAGE_MARK} where each belongs.")


def _texts(chat: Chat) -> Iterator[Any]:
    for message in chat:
        yield from (part.get("text") for part in _parts(message))


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the content of a message as parts."""
    content = message.get("content")
    items = content if isinstance(content, list) else [content] if content else []
    parts = [{"type": "text", "text": item} if isinstance(item, str) else item for item in items]
    return [part for part in parts if isinstance(part, dict)]


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in IMAGE_PARTS


def _source(part: Mapping[str, Any]) -> Any:
    """Return the image source of a message part, under any of the usual keys, or None if it has none."""
    for key in ("image", "image_url", "path", "url"):
        value = part.get(key)
        if value is not None:
            return value
    return {"bytes": part["base64"]} if part.get("base64") else None
