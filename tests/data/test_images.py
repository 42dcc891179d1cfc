"""Images in records: where rows may have them, what becomes of them in prompts, what is refused."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from vision_models import CONFIGS, IMAGE, image_file, vision_model

from slimectl.data.chat import render
from slimectl.data.columns import PromptOptions
from slimectl.data.images import images_of, processor_of, read_image, thumbnail
from slimectl.data.jsonl import read_samples, write_samples
from slimectl.data.prompts import open_prompts
from slimectl.data.supervised import sft_sample
from slimectl.errors import CheckpointError, RecordError
from slimectl.runtime import builders
from slimectl.runtime.builders import models
from slimectl.settings import Settings
from slimectl.stages.recorded_rounds import SampleFiles
from slimectl.types import Prompt, Sample

PART = {"type": "image"}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp("vision"), request.param)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def prompt_of(tmp_path: Path, row: dict[str, Any], **keys: Any) -> Prompt:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return next(open_prompts([str(file)], PromptOptions(**keys)))


@pytest.mark.parametrize(
    ("row", "content"),
    [
        ({"prompt": "<image>Which?", "images": ["a.png"]}, [PART, text("Which?")]),
        ({"prompt": "Is <image> like <image>?", "images": ["a.png", {"path": "b.png"}]},
         [text("Is "), PART, text(" like "), PART, text("?")]),
        ({"prompt": "Which?", "images": ["a.png"]}, [PART, text("Which?")]),
        ({"prompt": "Which?", "images": "a.png"}, [PART, text("Which?")]),
        ({"prompt": [{"role": "user", "content": "See <image>"}], "images": ["a.png"]}, [text("See "), PART]),
        ({"prompt": [{"role": "user", "content": [text("Which?"), PART]}], "images": ["a.png"]},
         [text("Which?"), PART]),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, text("Which?")]}]},
         [PART, text("Which?")]),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}]}, [PART]),
        ({"prompt": [{"role": "user", "content": [PART, "Which?"]}], "images": ["a.png"]}, [PART, text("Which?")]),
        ({"prompt": '[{"role": "user", "content": "<image>Which?"}]', "image": "a.png"}, [PART, text("Which?")]),
    ],
)  # fmt: skip
def test_rows_have_images_in_a_column_or_in_parts(tmp_path: Path, row: dict[str, Any], content: list[Any]):
    prompt = prompt_of(tmp_path, row)
    assert prompt.text == [{"role": "user", "content": content}]
    assert prompt.images == [str(tmp_path / name) for name in ("a.png", "b.png")[: content.count(PART)]]
    assert prompt.extra == {}


def test_a_result_that_is_an_object_stays_one_next_to_images(tmp_path: Path):
    chat = [{"role": "user", "content": "<image>?"}, {"role": "tool", "content": {"sky": "<image>"}}]
    assert prompt_of(tmp_path, {"prompt": chat, "images": ["a.png"]}).text[1] == chat[1]


def test_bytes_stay_base64_and_another_key_can_name_the_column(tmp_path: Path):
    data = Path(image_file(tmp_path / "a.png")).read_bytes()
    encoded = base64.b64encode(data).decode()
    forms = [{"bytes": encoded}, {"bytes": encoded, "path": None}, f"data:image/png;base64,{encoded}"]
    prompt = prompt_of(tmp_path, {"prompt": "?", "pictures": forms}, image_key="pictures")
    assert prompt.images == [{"bytes": encoded}] * 3
    assert read_image(prompt.images[2]) == data


def test_an_image_is_a_regular_file_and_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):  # reading the first two would never end
        with pytest.raises(RecordError, match="the image cannot be read: not a regular file"):
            read_image(str(path))
    monkeypatch.setattr("slimectl.data.images.MAX_BYTES", 10)
    (tmp_path / "image").write_bytes(b"x" * 10)
    assert read_image(str(tmp_path / "image")) == b"x" * 10
    (tmp_path / "image").write_bytes(b"x" * 11)
    with pytest.raises(RecordError, match="the image is larger than 0 MiB"):
        read_image(str(tmp_path / "image"))


@pytest.mark.parametrize("name", ["image", "image_path", "img", "image_paths", "image_url", "picture"])
def test_images_are_recognized_in_columns_of_other_names(tmp_path: Path, name: str):
    """A text model gets them too where a mark shows that the prompt has images; then the model refuses them."""
    placed = [{"role": "user", "content": [PART, text("Which?")]}]
    for value in ("a.png", ["a.png"], '["a.png"]', {"path": "a.png", "bytes": None}):
        row = {"problem": "<image>Which?", "answer": "red", "images": None, name: value}
        for reads_images in (False, True):
            prompt = prompt_of(tmp_path, row, reads_images=reads_images)
            assert (prompt.text, prompt.images) == (placed, [str(tmp_path / "a.png")])
            assert name not in prompt.extra
    unmarked = {"prompt": "Which?", name: "a.png"}
    assert prompt_of(tmp_path, unmarked, reads_images=True).images == [str(tmp_path / "a.png")]
    assert prompt_of(tmp_path, unmarked).extra == {name: "a.png"}


def test_raw_bytes_of_a_table_are_an_image(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    data = Path(image_file(tmp_path / "a.png")).read_bytes()
    struct = [{"bytes": data, "path": None}, None]
    for number, images in enumerate([pa.array([data, None]), pa.array([[data], []]), pa.array(struct)]):
        file = tmp_path / f"{number}.parquet"
        parquet.write_table(pa.table({"prompt": ["<image>Which?", "Which?"], "image": images}), file)
        first, second = open_prompts([str(file)], PromptOptions(reads_images=True))
        assert first.images == [{"bytes": base64.b64encode(data).decode()}]
        assert (second.text, second.images) == ("Which?", [])


def test_rows_without_images_stay_as_they_are(tmp_path: Path):
    row = {"prompt": "Write <image> in HTML", "images": [], "id": 7}
    prompt = prompt_of(tmp_path, row)
    assert (prompt.text, prompt.images, prompt.extra) == ("Write <image> in HTML", [], {"id": 7})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "<image> <image>", "images": ["a.png"]}, "more places for images than the row has images"),
        ({"prompt": "<image>", "images": ["a.png", "b.png"]}, "2 images, but the prompt has places for 1"),
        ({"prompt": "<image>", "images": ["https://example.org/a.png"]}, "is a URL, and images are not downloaded"),
        ({"prompt": "<image>", "images": [7]}, 'an image must be a path, or an object with "path" or "bytes"'),
        ({"prompt": [{"role": "user", "content": [PART]}]}, "more places for images"),
        ({"prompt": "<image><video>", "images": ["a.png"]}, "the prompt has <video>. Only images are supported"),
    ],
)
def test_a_row_that_does_not_fit_its_images_is_named(tmp_path: Path, row: dict[str, Any], reason: str):
    for reads_images in (False, True):
        with pytest.raises(RecordError, match=rf"rows.jsonl:1: images: .*{reason}"):
            prompt_of(tmp_path, row, reads_images=reads_images)


MARKED: list[Any] = [
    "<image>Which?",
    [{"role": "user", "content": "See <image>"}],
    [{"role": "user", "content": [{"type": "text", "text": "<image>Which?"}]}],
    [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "<image>Which?"}]}],
    "Listen to <audio>",
    "<|vision_start|><|image_pad|><|vision_end|>Which?",
]


@pytest.mark.parametrize(
    "row", [{"prompt": prompt, **images} for prompt in MARKED for images in ({}, {"images": None}, {"images": []})]
)
def test_a_mark_without_an_image_is_refused_for_a_model_that_reads_images(tmp_path: Path, row: dict[str, Any]):
    """For a text model it is text."""
    with pytest.raises(RecordError, match=r"rows.jsonl:1: images: the prompt has "):
        prompt_of(tmp_path, row, reads_images=True)
    assert "<" in json.dumps(prompt_of(tmp_path, row).text)
    with pytest.raises(RecordError, match=r"more places for images"):
        list(open_prompts([f"{generated(tmp_path)}:rows"], PromptOptions(reads_images=True)))


def generated(folder: Path) -> Path:
    (folder / "mine.py").write_text(
        "from slimectl.types import Prompt\ndef rows():\n    return [Prompt('<image>Which?')]\n"
    )
    return folder / "mine.py"


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"videos": ["a.mp4"]}, "videos: only images are supported"),
        ({"video": "a.mp4", "images": ["a.png"]}, "video: only images are supported"),
        ({"audio": {"path": "a.wav", "bytes": None}}, "audio: only images are supported"),
        ({"image_1": "a.png", "image_2": "b.png"}, "image_1, image_2: put the images of a row into one list, images"),
    ],
)
def test_columns_that_are_not_read_are_refused_by_name(tmp_path: Path, columns: dict[str, Any], reason: str):
    row = {"prompt": "Which?", **columns}
    with pytest.raises(RecordError, match=rf"rows.jsonl:1: {reason}"):
        prompt_of(tmp_path, row, reads_images=True)
    empty = dict.fromkeys(columns, None)
    assert prompt_of(tmp_path, {"prompt": "Which?", **empty}, reads_images=True).images == []


def test_a_video_part_is_refused_by_name_and_a_text_model_warns_of_a_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    part = {"type": "video", "video": "a.mp4"}
    row = {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}]}
    reason = r"prompt: message\[0\]\.content: has a part of type 'video'. Only text and images are read. Give frames"
    with pytest.raises(RecordError, match=reason):
        prompt_of(tmp_path, row, reads_images=True)
    with pytest.raises(RecordError, match="has a part of type 'video'"):
        prompt_of(tmp_path, row)
    for _ in range(2):
        prompt = prompt_of(tmp_path, {"prompt": "Which?", "video": "a.mp4"})
    assert prompt.extra == {"video": "a.mp4"}
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.endswith("rows.jsonl: video: is ignored. The model sees only the text of the prompt.")


def test_the_model_of_the_settings_decides_whether_a_mark_is_a_place(folder: Path, model_dir: Any, tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "<image>Which?", "chosen": "a", "rejected": "b", "label": "a"}\n')
    row = '{"messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "a"}]}\n'
    (tmp_path / "chats.jsonl").write_text(row)

    def read(model: Path, algorithm: str, name: str = "rows.jsonl") -> list[Any]:
        overrides = {"model": {"path": str(model)}, "algorithm": {"name": algorithm}}
        settings = Settings.model_validate(overrides)
        if algorithm == "grpo":
            return list(builders.prompts(settings, [str(file)]))
        given = tmp_path / name, builders.tokenizer(model)
        rows = builders.training_samples(settings, SampleFiles([str(given[0])]), given[1])
        return list(rows)

    assert models.reads_images(Settings.model_validate({"model": {"card": "tiny-vl"}}).model)
    assert not models.reads_images(Settings.model_validate({"model": {"path": str(tmp_path / "none")}}).model)
    for case in (("grpo",), ("sft",), ("sft", "chats.jsonl"), ("dpo",)):
        with pytest.raises(RecordError, match=r"jsonl:1: images: the prompt has more places for images"):
            read(folder, *case)
        assert read(model_dir("llama"), *case)


def test_placeholders_become_as_many_as_the_image_has_tokens(folder: Path, tmp_path: Path):
    """32 by 32 pixels are 16 tokens of 8 by 8; 24 by 40 are 15."""
    tokenizer = builders.tokenizer(folder)
    images = [image_file(tmp_path / "a.png"), image_file(tmp_path / "b.png", width=24, height=40)]
    chat = [{"role": "user", "content": [PART, text("or"), PART]}]
    tokens = render(Prompt(chat, images=images), tokenizer)
    assert tokenizer.decode(tokens) == (
        f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * 16}<|vision_end|>or"
        f"<|vision_start|>{'<|image_pad|>' * 15}<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    whole, length, mask = sft_sample(Prompt(chat, label="yes", images=images), tokenizer)
    assert whole[: len(tokens)] == tokens
    assert tokenizer.decode(whole[-length:]) == "yes<|im_end|>"
    assert mask == [1] * length
    with pytest.raises(RecordError, match="1 images, but the chat template has places for 2"):
        render(Prompt(chat, images=images[:1]), tokenizer)


def test_the_template_of_a_processor_stands_in_for_one_of_the_tokenizer(folder: Path, tmp_path: Path):
    copytree(folder, tmp_path / "model")
    template = (tmp_path / "model" / "chat_template.jinja").read_text()
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert not builders.tokenizer(tmp_path / "model").chat_template
    (tmp_path / "model" / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert builders.tokenizer(tmp_path / "model").chat_template == template


def test_the_grid_of_the_header_is_that_of_the_pixels(folder: Path, tmp_path: Path):
    from PIL import Image

    processor = processor_of(str(folder))
    for width, height in ((8, 8), (31, 33), (100, 20), (300, 400)):
        path = image_file(tmp_path / "a.png", width=width, height=height)
        assert processor.grid(path) == processor.patches(path).grid
    turned = Image.new("RGB", (48, 16))
    exif = turned.getexif()
    exif[0x0112] = 6  # a quarter turn
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert processor.grid(str(tmp_path / "turned.jpg")) == processor.patches(str(tmp_path / "turned.jpg")).grid
    assert processor.grid(str(tmp_path / "turned.jpg")) == (1, 12, 4)
    Image.new("RGBA", (16, 16)).save(tmp_path / "clear.png")
    assert processor.patches(str(tmp_path / "clear.png")).pixels_PW.shape == (16, 3 * 2 * 4 * 4)
    assert processor.grid(str(tmp_path / "clear.png")) == (1, 4, 4)


def png(width: int, depth: int, kind: int, row: bytes, *, transparent: bytes = b"", palette: bytes = b"") -> bytes:
    """A PNG of one row, chunk by chunk: `kind` 0 is grey, 2 RGB, 3 a palette, 4 grey with alpha, 6 RGBA."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    parts = [(b"PLTE", palette), (b"tRNS", transparent), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, kind, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + header + b"".join(chunk(name, data) for name, data in parts if data or name == b"IEND")
    )


def words(*levels: int) -> bytes:
    return struct.pack(f">{len(levels)}H", *levels)


WHITE = (255, 255, 255)
HALF = (227, 177, 127)
"""(200, 100, 0) with alpha 128 on white: 200 * 128 / 255 + 127 is 227.4, 100 * 128 / 255 + 127 is 177.2."""
PALETTE = bytes([1, 2, 3, 200, 100, 0])


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        (png(2, 8, 6, bytes([1, 2, 3, 0, 200, 100, 0, 128])), [WHITE, HALF]),
        (png(2, 8, 6, bytes([0, 0, 0, 0, 0, 0, 0, 255])), [WHITE, (0, 0, 0)]),
        (png(2, 16, 6, words(1, 2, 3, 0, 200 * 257, 100 * 257, 0, 128 * 257)), [WHITE, HALF]),
        (png(2, 8, 4, bytes([10, 0, 200, 128])), [WHITE, (227,) * 3]),
        (png(2, 16, 4, words(10, 0, 200 * 257, 128 * 257)), [WHITE, (227,) * 3]),
        (png(2, 8, 3, bytes([0, 1]), palette=PALETTE, transparent=bytes([0, 128])), [WHITE, HALF]),
        (png(2, 4, 3, bytes([0x01]), palette=PALETTE, transparent=bytes([0])), [WHITE, (200, 100, 0)]),
        (png(2, 8, 3, bytes([0, 1]), palette=PALETTE), [(1, 2, 3), (200, 100, 0)]),
        (png(2, 8, 2, bytes([1, 2, 3, 4, 5, 6]), transparent=words(1, 2, 3)), [WHITE, (4, 5, 6)]),
        (png(2, 16, 2, words(40000, 514, 771, 1, 255, 65535), transparent=words(40000, 514, 771)),
         [WHITE, (0, 0, 255)]),
        (png(2, 8, 0, bytes([10, 20]), transparent=words(10)), [WHITE, (20,) * 3]),
        (png(2, 4, 0, bytes([0x35]), transparent=words(3)), [WHITE, (85,) * 3]),
        (png(2, 2, 0, bytes([0b01100000]), transparent=words(1)), [WHITE, (170,) * 3]),
        (png(2, 1, 0, bytes([0b01000000]), transparent=words(0)), [WHITE, WHITE]),
        (png(2, 1, 0, bytes([0b01000000])), [(0, 0, 0), WHITE]),
        (png(4, 16, 0, words(0, 25700, 128, 65535)), [(0,) * 3, (100,) * 3, (0,) * 3, WHITE]),
        (png(3, 16, 0, words(129, 300, 25700), transparent=words(25700)), [(1,) * 3, (1,) * 3, WHITE]),
    ],
)  # fmt: skip
def test_transparent_pixels_are_white_and_levels_of_16_bits_are_scaled(tmp_path: Path, data: bytes, pixels: list[Any]):
    from PIL import Image

    (tmp_path / "a.png").write_bytes(data)
    shown = Image.open(io.BytesIO(thumbnail(str(tmp_path / "a.png"))))
    assert (shown.mode, shown.size) == ("RGB", (len(pixels), 1))
    assert [shown.getpixel((x, 0)) for x in range(len(pixels))] == pixels


def test_a_clear_ground_is_white_in_the_patches_of_every_format(folder: Path, tmp_path: Path):
    """A black square on a transparent ground is the same picture as on a white one; a turned 16-bit one, too."""
    from PIL import Image

    processor = processor_of(str(folder))
    clear, white, deep = Image.new("RGBA", (32, 32)), Image.new("RGB", (32, 32), "white"), Image.new("I;16", (32, 32))
    for x, y in itertools.product(range(32), range(32)):
        is_black = x < 8
        deep.putpixel((x, y), 0 if is_black else 65535)
        if is_black:
            clear.putpixel((x, y), (0, 0, 0, 255))
            white.putpixel((x, y), (0, 0, 0))
    exif = deep.getexif()
    exif[0x0112] = 3  # a half turn
    white.save(tmp_path / "white.png")
    wanted_PW = processor.patches(str(tmp_path / "white.png")).pixels_PW
    for image, name, options in (
        (clear, "a.png", {}), (clear, "b.webp", {"lossless": True}), (clear, "c.gif", {}),
        (deep.rotate(180), "d.png", {"exif": exif}), (white.convert("CMYK"), "e.jpg", {"quality": 100}),
        (white.convert("1"), "f.bmp", {}),
    ):  # fmt: skip
        image.save(tmp_path / name, **options)
        assert np.abs(processor.patches(str(tmp_path / name)).pixels_PW - wanted_PW).max() < 1e-6, name


def test_patches_are_those_of_transformers(folder: Path, tmp_path: Path):
    import numpy as np
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    path = image_file(tmp_path / "a.png", width=50, height=30)
    expected = Qwen2VLImageProcessorPil.from_pretrained(folder)([Image.open(path)], return_tensors="np")
    patches = processor_of(str(folder)).patches(path)
    assert np.array_equal(patches.pixels_PW, expected["pixel_values"].astype("float32"))
    assert processor_of(str(folder)).patches(path) is patches


def test_a_processor_among_others_in_one_file_is_read(folder: Path, tmp_path: Path):
    copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "preprocessor_config.json"
    file.with_name("processor_config.json").write_text(json.dumps({"image_processor": json.loads(file.read_text())}))
    file.unlink()
    path = image_file(tmp_path / "a.png", width=50, height=30)
    patches, expected = (processor_of(str(model)).patches(path) for model in (tmp_path / "model", folder))
    assert patches.grid == expected.grid
    assert (patches.pixels_PW == expected.pixels_PW).all()


def test_files_that_are_no_images_are_one_line(folder: Path, tmp_path: Path):
    processor = processor_of(str(folder))
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(RecordError, match=r"a.png: is not a PNG, JPEG, WEBP, GIF, BMP image. Convert it."):
        processor.grid(str(tmp_path / "a.png"))
    whole = Path(image_file(tmp_path / "b.png", width=64, height=64)).read_bytes()
    (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
    for read in (processor.grid, processor.patches):
        with pytest.raises(RecordError, match=r"b.png: the image cannot be decoded: image file is truncated"):
            read(str(tmp_path / "b.png"))
    with pytest.raises(RecordError, match=r"none.png: the image cannot be read: No such file"):
        processor.grid(str(tmp_path / "none.png"))
    with pytest.raises(RecordError, match="its bytes are not base64"):
        processor.grid({"bytes": "!!!"})
    with pytest.raises(RecordError, match="aspect ratio"):
        processor.grid(image_file(tmp_path / "long.png", width=900, height=2))


def test_a_text_model_refuses_images(model_dir: Any, tmp_path: Path):
    tokenizer = builders.tokenizer(model_dir("llama"))
    with pytest.raises(CheckpointError, match="model_type 'llama' does not support images here"):
        render(Prompt([{"role": "user", "content": [PART]}], images=[image_file(tmp_path / "a.png")]), tokenizer)


def test_samples_keep_their_images_and_take_paths_from_their_file(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    file = tmp_path / "deep" / "samples.jsonl"
    samples = [Sample(index=i, prompt="?", multimodal_inputs={"images": [f"../{i}.png"]}) for i in range(2)]
    write_samples(file, samples)
    first, second = read_samples(file)
    assert images_of(first) == [str(tmp_path / "deep" / ".." / "0.png")]
    write_samples(tmp_path / "elsewhere.jsonl", [first, second])
    assert list(map(images_of, read_samples(tmp_path / "elsewhere.jsonl"))) == list(map(images_of, (first, second)))
    file.write_text('{"prompt": "?", "multimodal_inputs": {"videos": ["a.mp4"]}}\n')
    with pytest.raises(
        RecordError, match=r"samples.jsonl:1: Sample.multimodal_inputs: videos: only images are supported"
    ):
        list(read_samples(file))


def test_a_hundred_thousand_samples_hold_no_pixels(tmp_path: Path):
    """A sample with an image takes less than 4 KB, and its image of 3 MB is not opened."""
    image = image_file(tmp_path / "a.png", width=1024, height=1024)
    assert Path(image).stat().st_size > 3e6
    line = json.dumps({"prompt": [{"role": "user", "content": [PART]}], "multimodal_inputs": {"images": ["a.png"]},
                       "tokens": [IMAGE] * 16, "response_length": 0})  # fmt: skip
    file = tmp_path / "samples.jsonl"
    count = 2000
    file.write_text(f"{line}\n" * count)
    tracemalloc.start()
    samples = list(read_samples(file))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) == count
    assert held / count < 4096
