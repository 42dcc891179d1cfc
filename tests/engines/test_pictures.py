"""Images in the embedded engine: transformers' logits, and a prefix cache that tells images apart."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer
from vision_models import (
    CONFIGS,
    image_file,
    image_prompt,
    reference_log_probs,
    reference_logits,
    reference_model,
    vision_model,
)

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.data.images import processor_of
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.errors import RecordError
from slimectl.types import Completion, SamplingParams, TrainingSample


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture(scope="module")
def images(folder: Path) -> list[str]:
    sizes = ((32, 32), (24, 40), (48, 16))
    return [image_file(folder / f"{i}.png", width=w, height=h, seed=i) for i, (w, h) in enumerate(sizes)]


def new_engine(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    engine = EmbeddedEngine(config, AutoTokenizer.from_pretrained(folder), images=processor_of(str(folder)).patches)
    engine.load_weights(HFCheckpoint().read(folder), version="0")
    return engine


def answers(engine: Any, requests: list[tuple[list[int], list[str]]], tokens: int = 6) -> list[Completion]:
    async def run() -> list[Completion]:
        params = [SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True) for seed in range(len(requests))]
        calls = [engine.generate(prompt, params=p, images=i) for (prompt, i), p in zip(requests, params, strict=True)]
        return await asyncio.gather(*calls)

    return asyncio.run(run())


def test_logits_and_sampled_log_probs_are_those_of_transformers(folder: Path, images: list[str]):
    """One pass over prompts of two, one and no images, whose sides are no multiples of the window."""
    processor, model, engine = processor_of(str(folder)), reference_model(folder), new_engine(folder)
    requests = [(image_prompt(processor, chosen, "a?"), chosen) for chosen in (images[:2], images[2:], [])]
    with torch.no_grad():
        pictures = engine._model.pictures
        held = [pictures.shared([processor.patches(image) for image in chosen]) for _, chosen in requests]
        marked = [pictures.marked(tokens, each)[0] for (tokens, _), each in zip(requests, held, strict=True)]
        for prefix, (tokens, chosen) in zip(engine._model.prefill(marked, [None] * 3), requests, strict=True):
            expected = reference_logits(model, tokens, chosen, folder)[-1]
            assert expected.abs().max() > 0.3
            assert (prefix.logits_V - expected).abs().max() < 1e-5
        for answer, (tokens, chosen) in zip(answers(engine, requests), requests, strict=True):
            row = TrainingSample([*tokens, *answer.tokens], 6, [], images=chosen)
            assert (reference_log_probs(model, row, folder) - torch.tensor(answer.log_probs)).abs().max() < 1e-5


def test_one_prompt_with_two_images_is_two_prompts_and_siblings_share_theirs(folder: Path, images: list[str]):
    engine, tokens = new_engine(folder), image_prompt(processor_of(str(folder)), images[:1])
    other = image_file(folder / "other.png", seed=9)
    first, sibling, second = answers(engine, [(tokens, images[:1]), (tokens, images[:1]), (tokens, [other])], 24)
    assert (first.cached_tokens, sibling.cached_tokens, second.cached_tokens) == (0, len(tokens), 0)
    alone = answers(new_engine(folder), [(tokens, [other])] * 3, 24)[2]
    assert second.tokens == alone.tokens
    assert second.log_probs == pytest.approx(alone.log_probs, abs=1e-6)
    # A later turn finds the image in the cache, and goes on behind it.
    turn = [*tokens, *first.tokens[:-1], *b" and then, what is left of it?"]
    later = answers(engine, [(turn, images[:1])])[0]
    assert later.cached_tokens == len(tokens) + 23
    fresh = answers(new_engine(folder), [(turn, images[:1])])[0]
    assert later.tokens == fresh.tokens
    assert later.log_probs == pytest.approx(fresh.log_probs, abs=1e-5)


def test_a_prompt_goes_on_from_the_cache_within_an_image(folder: Path, images: list[str]):
    engine, processor = new_engine(folder), processor_of(str(folder))
    within = image_prompt(processor, images[:2], "")[:-1]  # its last token is one of an image
    answers(engine, [(within, images[:2])])
    answer = answers(engine, [(within, images[:2])])[0]
    assert answer.cached_tokens == len(within) - 1
    row = TrainingSample([*within, *answer.tokens], 6, [], images=images[:2])
    expected_R = reference_log_probs(reference_model(folder), row, folder)
    assert (expected_R - torch.tensor(answer.log_probs)).abs().max() < 1e-5


def test_an_image_stays_as_long_as_a_sequence_holds_it(folder: Path, images: list[str]):
    """Two reads of one image are one object, which the end of one of its sequences does not take from the other."""
    pictures, patches = new_engine(folder)._model.pictures, processor_of(str(folder)).patches(images[0])
    first = pictures.shared([replace(patches)])
    prompt, shift = pictures.marked(image_prompt(processor_of(str(folder)), images[:1]), first)
    second = pictures.shared([replace(patches)])
    assert second[0] is first[0]
    del second
    assert shift == 4 - 16  # four by four tokens take four positions
    assert pictures.inputs([prompt], [0]).features.embeddings_CO.shape == (16, 32)
    del first
    with pytest.raises(KeyError):
        pictures.inputs([prompt], [0])


def test_tokens_that_do_not_fit_the_image_are_refused(folder: Path, images: list[str]):
    with pytest.raises(RecordError, match="image 0 is 16 tokens for this model"):
        answers(new_engine(folder), [([259, *[261] * 9, 260, 65], images[:1])])


def test_weights_are_taken_under_the_names_of_modules_and_of_checkpoints(folder: Path):
    engine = new_engine(folder)
    assert dict(engine._model.weights.tensors()).keys() == load_file(folder / "model.safetensors").keys()
    engine.load_weights(reference_model(folder).state_dict().items(), version="1")
    assert engine.weight_version == "1"


def test_features_of_an_image_do_not_depend_on_the_images_beside_it(folder: Path, images: list[str]):
    pictures, processor = new_engine(folder)._model.pictures, processor_of(str(folder))
    held = pictures.shared([processor.patches(image) for image in images])
    first, second = (
        pictures.marked(image_prompt(processor, [each]), [one])[0]
        for each, one in zip(images[:2], held[:2], strict=True)
    )
    alone = pictures.inputs([second], [0]).features
    beside = pictures.inputs([first, second], [0, 0]).features
    assert torch.equal(beside.embeddings_CO[-len(alone.embeddings_CO) :], alone.embeddings_CO)
    for alone_CO, beside_CO in zip(alone.deepstack, beside.deepstack, strict=True):
        assert torch.equal(beside_CO[-len(alone_CO) :], alone_CO)
