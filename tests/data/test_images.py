"""Images in records: where rows may have them, what becomes of them in prompts, what is refused."""

from __future__ import annotations

import base64
import json
import os
import tracemalloc
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from vision_models import CONFIGS, IMAGE, image_file, vision_model

from slimectl import builders
from slimectl.data.chat import render
from slimectl.data.images import images_of, processor_of, read_image
from slimectl.data.jsonl import read_samples, write_samples
from slimectl.data.prompts import open_prompts
from slimectl.data.supervised import sft_sample
from slimectl.errors import CheckpointError, RecordError
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
    return next(open_prompts([str(file)], **keys))


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
    ],
)  # fmt: skip
def test_rows_have_images_in_a_column_or_in_parts(tmp_path: Path, row: dict[str, Any], content: list[Any]):
    prompt = prompt_of(tmp_path, row)
    assert prompt.text == [{"role": "user", "content": content}]
    assert prompt.images == [str(tmp_path / name) for name in ("a.png", "b.png")[: content.count(PART)]]
    assert prompt.extra == {}


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
        with pytest.raises(RecordError, match="the image cannot be read: no regular file"):
            read_image(str(path))
    monkeypatch.setattr("slimectl.data.images.MAX_BYTES", 10)
    (tmp_path / "image").write_bytes(b"x" * 10)
    assert read_image(str(tmp_path / "image")) == b"x" * 10
    (tmp_path / "image").write_bytes(b"x" * 11)
    with pytest.raises(RecordError, match="an image of more than 0 MiB"):
        read_image(str(tmp_path / "image"))


def test_rows_without_images_stay_as_they_are(tmp_path: Path):
    row = {"prompt": "Write <image> in HTML", "images": [], "id": 7}
    prompt = prompt_of(tmp_path, row)
    assert (prompt.text, prompt.images, prompt.extra) == ("Write <image> in HTML", [], {"id": 7})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "<image> <image>", "images": ["a.png"]}, "more places for images than its row has images"),
        ({"prompt": "<image>", "images": ["a.png", "b.png"]}, "2 images, and the prompt has places for 1"),
        ({"prompt": "<image>", "images": ["https://example.org/a.png"]}, "is an address, and images are not fetched"),
        ({"prompt": "<image>", "images": [7]}, 'an image is a path, or an object with "path" or "bytes"'),
        ({"prompt": [{"role": "user", "content": [PART]}]}, "more places for images"),
    ],
)
def test_a_row_that_does_not_fit_its_images_is_named(tmp_path: Path, row: dict[str, Any], reason: str):
    with pytest.raises(RecordError, match=rf"rows.jsonl:1: images: .*{reason}"):
        prompt_of(tmp_path, row)


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
    with pytest.raises(RecordError, match="1 images, and the chat template has places for 2"):
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
    with pytest.raises(RecordError, match=r"a.png: is no image of PNG, JPEG, WEBP, GIF, BMP; convert it"):
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
    with pytest.raises(CheckpointError, match="model_type 'llama' reads no images here"):
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
        RecordError, match=r"samples.jsonl:1: Sample.multimodal_inputs: videos: this version reads images"
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
