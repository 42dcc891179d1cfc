"""Images of prompts and samples: their sources in records, and their patches for a model.

P patches of an image · W values of a patch.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.architectures.image_tokens import MODEL_TYPES, Grid, ImageTokens
from slimectl.data.io import regular_file
from slimectl.errors import CheckpointError, RecordError, SettingsError, first_line, requiring
from slimectl.system.model_files import MAX_CONFIG_BYTES, read_json
from slimectl.types import ImageSource, Sample

if TYPE_CHECKING:
    import numpy as np

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 64 * 2**20
"""Size limit of an image file: records are untrusted."""
MAX_PIXELS = 2**26
"""Limit of width times height, before the model's processor shrinks the image."""
CACHE_BYTES = 64 * 2**20
"""Number of images whose patches a processor caches: sibling samples, and a trainer in the same process, reuse them."""
PROCESSOR, PROCESSORS = "preprocessor_config.json", "processor_config.json"
"""Configuration files of a model's image processor. transformers 5 writes one file for all processors."""


def images_of(sample: Sample) -> list[ImageSource]:
    """Return the images of a sample, in prompt order."""
    return list((sample.multimodal_inputs or {}).get("images") or [])


def image_source(value: Any, folder: Path) -> ImageSource:
    """Return an image of a row in the form of records: an absolute path, or its bytes in base64.

    A row may hold a path (relative to `folder`), a data: URL, an object with `path` or `bytes` (base64, or raw from a
    table), or raw bytes. Raises ValueError for anything else, including other URLs, which are not downloaded.
    """
    if isinstance(value, bytes):
        value = {"bytes": value}
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        data = value["bytes"]
        text = base64.b64encode(data).decode() if isinstance(data, bytes) else data
        if not isinstance(text, str):
            raise ValueError("the bytes of an image must be base64 text")
        return {"bytes": text}
    if isinstance(value, Mapping):
        value = value.get("path", value.get("url"))
    if not isinstance(value, str) or not value:
        raise ValueError('an image must be a path, or an object with "path" or "bytes"')
    if value.startswith("data:"):
        header, comma, text = value.partition(",")
        if not comma or not header.endswith(";base64"):
            raise ValueError("a data: URL of an image must hold base64")
        return {"bytes": text}
    if value.startswith("file://"):
        value = value.removeprefix("file://")
    if "://" in value:
        raise ValueError(f"{value[:60]} is a URL, and images are not downloaded. Download it and give its path.")
    return str((folder / value).absolute())


def read_image(source: ImageSource, *, folders: Sequence[Path] | None = None) -> bytes:
    """Return the bytes of an image. With `folders`, a file must be below one of them, after resolving links.

    Devices and pipes are not opened. Raises RecordError.
    """
    if isinstance(source, str):
        return _file_bytes(source, folders)
    try:
        return base64.b64decode(source["bytes"], validate=True)
    except (binascii.Error, ValueError):
        raise RecordError("image: its bytes are not base64. Encode the file again.") from None


def _file_bytes(name: str, folders: Sequence[Path] | None) -> bytes:
    try:
        path = Path(name).resolve()
        if folders is not None and not any(path.is_relative_to(folder.resolve()) for folder in folders):
            raise RecordError(
                f"{name}: is outside the folders of these samples and their data. Copy it into one of them."
            )
        with regular_file(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the path, or a link to itself
        raise RecordError(f"{name}: the image cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise RecordError(f"{name}: the image is larger than {MAX_BYTES // 2**20} MiB. Make it smaller.")
    return data


@dataclass(frozen=True, eq=False)
class Patches:
    """An image as input of a vision tower: patches [P, W] in float32 and their grid. `key` identifies the content."""

    pixels_PW: np.ndarray
    grid: Grid
    key: int


class ImageProcessor:
    """The image processor of one model, with a cache of recently processed images."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError for a model that reads no images, MissingExtraError without Pillow."""
        config = read_json(folder / "config.json", max_bytes=MAX_CONFIG_BYTES)
        if config.get("model_type") not in MODEL_TYPES:
            raise CheckpointError(
                f"{folder}: model_type {config.get('model_type')!r} does not support images here. Use a model of type"
                f" {', '.join(MODEL_TYPES)}, or prompts without images."
            )
        if not any((folder / name).is_file() for name in (PROCESSOR, PROCESSORS)):
            raise CheckpointError(f"{folder}: no {PROCESSOR}. Copy it from the model's original checkpoint.")
        _pillow()
        from transformers import AutoConfig
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

        self._resized = smart_resize
        try:
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
            tokens = ImageTokens.of(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
        except Exception as error:
            reason = f"cannot be used ({first_line(error):.200})"
            raise CheckpointError(f"{folder / PROCESSOR}: {reason}. Copy it again.") from error
        assert tokens is not None
        self.tokens = tokens
        self._cache: OrderedDict[bytes, Patches] = OrderedDict()
        self._cached_bytes = 0

    def grid(self, source: ImageSource) -> Grid:
        """Return the grid of an image, reading only its header. Raises RecordError."""
        image = _open(read_image(source), source)
        width, height = image.size
        try:
            orientation = image.getexif().get(0x0112, 1)  # a PNG may have it after its pixels, which are then decoded
        except Exception as error:
            raise _undecodable(source, error) from None
        if orientation >= 5:  # rotated by 90 degrees: the image is turned when it is decoded
            width, height = height, width
        patch, merge, size = self._processor.patch_size, self.tokens.merge, self._processor.size
        try:
            rows, columns = self._resized(
                height,
                width,
                factor=patch * merge,
                min_pixels=size["shortest_edge"],
                max_pixels=size["longest_edge"],
            )
        except ValueError as error:
            raise RecordError(f"{_name(source)}: {error}") from None
        return 1, rows // patch, columns // patch

    def patches(self, source: ImageSource) -> Patches:
        """Return the patches of an image. Raises RecordError."""
        data = read_image(source)
        digest = hashlib.sha256(data).digest()
        if digest in self._cache:
            self._cache.move_to_end(digest)
            return self._cache[digest]
        image = _decoded(data, source)
        features = self._processor.preprocess([image], return_tensors="np")
        pixels_PW = features["pixel_values"].astype("float32")
        frames, height, width = map(int, features["image_grid_thw"][0])
        patches = Patches(pixels_PW, (frames, height, width), int.from_bytes(digest[:7], "big"))
        self._keep(digest, patches)
        return patches

    def repeats(self, tokens: Sequence[int], images: Sequence[ImageSource]) -> list[int]:
        """Return how often each token of a rendered prompt occurs in the model's input.

        A placeholder is repeated for every token of its image. Raises RecordError if the numbers of placeholders and
        images differ.
        """
        places = [i for i, token in enumerate(tokens) if token == self.tokens.token]
        if len(places) != len(images):
            raise RecordError(
                f"prompt: {len(images)} images, but the chat template has places for {len(places)}. Give one part of"
                ' type "image" for each.'
            )
        counts = [1] * len(tokens)
        for place, source in zip(places, images, strict=True):
            counts[place] = self.tokens.count(self.grid(source))
        return counts

    def _keep(self, digest: bytes, patches: Patches) -> None:
        self._cache[digest] = patches
        self._cached_bytes += patches.pixels_PW.nbytes
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.pixels_PW.nbytes


def thumbnail(source: ImageSource, *, side: int = 256, folders: Sequence[Path] | None = None) -> bytes:
    """Return an image as a PNG of at most `side` pixels per side. `folders` is as in `read_image`.

    Raises RecordError, MissingExtraError.
    """
    image, output = _decoded(read_image(source, folders=folders), source), io.BytesIO()
    image.thumbnail((side, side))
    image.save(output, format="PNG")
    return output.getvalue()


def _pillow() -> Any:
    with requiring("Pillow", extra="vision", wanted_by="a prompt with images"):
        import PIL.Image
        import PIL.ImageOps
    return PIL


def _open(data: bytes, source: ImageSource) -> Any:
    """Open an image without decoding its pixels."""
    library = _pillow()
    try:
        image = library.Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception:
        raise RecordError(f"{_name(source)}: is not a {', '.join(FORMATS)} image. Convert it.") from None
    if image.width * image.height > MAX_PIXELS:
        raise RecordError(f"{_name(source)}: {image.width} x {image.height} pixels are too many. Make it smaller.")
    return image


def _decoded(data: bytes, source: ImageSource) -> Any:
    """Return an image in RGB on white, rotated by its EXIF orientation."""
    opened = _open(data, source)
    try:
        if opened.format == "PNG":
            _scale_transparent_level(opened, depth=data[24])
        return _on_white(_pillow().ImageOps.exif_transpose(opened))
    except Exception as error:
        raise _undecodable(source, error) from None


def _scale_transparent_level(image: Any, *, depth: int) -> None:
    """Scale the transparent level of a PNG to 8 bits. Pillow (12) scales the pixels but not this level."""
    level = image.info.get("transparency")
    if level is not None and image.mode in ("L", "RGB"):
        levels = [
            v >> 8 if depth == 16 else v * 255 // (2**depth - 1) for v in (level if image.mode == "RGB" else [level])
        ]
        image.info["transparency"] = tuple(levels) if image.mode == "RGB" else levels[0]


def _on_white(image: Any) -> Any:
    """Return an image in 8-bit RGB, with transparent pixels on white as in Qwen's processors."""
    library = _pillow()
    if image.mode.startswith("I"):  # 16-bit gray: convert() would turn all levels above 255 white
        import numpy as np

        levels_HW = np.asarray(image).clip(0, 65535)
        grey_HW = ((np.arange(65536) + 128) // 257).astype(np.uint8)[levels_HW]
        if (level := image.info.get("transparency")) is not None:
            grey_HW[levels_HW == level] = 255
        return library.Image.fromarray(grey_HW).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    opaque = image.convert("RGBA")
    on_white = library.Image.new("RGB", image.size, "white")
    on_white.paste(opaque, mask=opaque.getchannel("A"))
    return on_white


def _undecodable(source: ImageSource, error: Exception) -> RecordError:
    return RecordError(f"{_name(source)}: the image cannot be decoded: {error}")


def _name(source: ImageSource) -> str:
    return source if isinstance(source, str) else "image"


@functools.lru_cache(maxsize=4)
def processor_of(folder: str) -> ImageProcessor:
    """Return the image processor of a model directory, shared within this process."""
    return ImageProcessor(Path(folder))


def tokenizer_processor(tokenizer: Any) -> ImageProcessor:
    """Return the image processor in a tokenizer's folder. Raises SettingsError if that is not a model folder."""
    folder = str(getattr(tokenizer, "name_or_path", ""))
    if not (Path(folder) / "config.json").is_file():
        raise SettingsError(
            "model.path: its tokenizer was not loaded from a model directory, so images cannot be processed"
        )
    return processor_of(folder)
