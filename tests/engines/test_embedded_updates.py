"""Pauses, weights that come in parts, and requests that are watched or ended one by one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.data.hashing import tensor_checksum
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.engines.weight_sync.delta import write_delta
from slimectl.engines.weight_sync.delta_format import DeltaFile, Versions
from slimectl.errors import BackendError, CheckpointError
from slimectl.types import Completion, SamplingParams

Make = Callable[..., EmbeddedEngine]
Tensors = dict[str, torch.Tensor]
PROMPT = list(b"once upon a time")
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
FREE = SamplingParams(max_tokens=60, ignore_eos=True, seed=4)


@pytest.fixture
def tensors(model_dir: Callable[[str], Path]) -> Tensors:
    return dict(HFCheckpoint().read(model_dir("llama")))


@pytest.fixture
def changed(tensors: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    return {name: t + 0.3 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


def answer(engine: EmbeddedEngine, params: SamplingParams = GREEDY) -> Completion:
    return asyncio.run(engine.generate(PROMPT, params=params))


def interrupted(engine: EmbeddedEngine, by: Callable[[], None], params: SamplingParams = GREEDY) -> Completion:
    """An answer, to which something happens after its tenth token."""

    async def scene() -> Completion:
        task = asyncio.create_task(engine.generate(PROMPT, params=params))
        begun = engine.stats.steps
        while engine.stats.steps < begun + 10:
            await asyncio.sleep(0)
        by()
        return await task

    return asyncio.run(scene())


def delta_between(folder: Path, old: Tensors, new: Tensors) -> DeltaFile:
    """A delta from version 0, the old tensors, to version 1."""
    folder.mkdir()
    HFCheckpoint().write(folder, old.items())
    (folder / "weight_version.txt").write_text("0")
    target, versions = folder / "change.delta", Versions("0", "1")
    write_delta(iter(new.items()), target=target, base=folder, versions=versions, dtype=None)
    return DeltaFile(target)


@pytest.mark.parametrize("compile_kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "share"), [("qwen3", 0.01), ("qwen2", 0.01), ("qwen3", 0.5), ("qwen3_next", 0.01)])
def test_a_delta_makes_the_weights_of_a_whole_load(
    family: str,
    share: float,
    dtype: torch.dtype,
    compile_kernels: bool,
    model_dir: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = model_dir(family)
    old = {name: tensor.to(dtype) for name, tensor in HFCheckpoint().read(folder)}
    new = {name: torch.where(torch.rand(each.shape) < share, each * 1.5 + 0.1, each) for name, each in old.items()}
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    engine, whole = (
        EmbeddedEngine(config, tokenizer, EngineOptions(dtype=dtype, compile_kernels=compile_kernels)) for _ in range(2)
    )
    engine.load_weights(old.items(), version="0")
    engine.apply_delta(delta_between(tmp_path / "0", old, new), version="1")
    whole.load_weights(new.items(), version="1")
    assert engine.checksums(tensor_checksum) == whole.checksums(tensor_checksum)
    params = dataclasses.replace(GREEDY, max_tokens=4)
    assert answer(engine, params).log_probs == answer(whole, params).log_probs


def test_a_delta_that_does_not_fit_changes_nothing_and_one_that_lies_leaves_no_weights(
    make_engine: Make, tensors: Tensors, changed: Tensors, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.load_weights(tensors.items(), version="7")
    before = engine.checksums(tensor_checksum)
    delta = delta_between(tmp_path / "0", tensors, changed)
    with pytest.raises(CheckpointError, match="the delta applies to version 0, but the engine has 7"):
        engine.apply_delta(delta, version="1")
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"is torch\.float32 on cpu here, and BF16 in the delta"):
        engine.apply_delta(delta_between(tmp_path / "1", narrow, narrow), version="1")
    few = dict(list(tensors.items())[1:])
    with pytest.raises(CheckpointError, match=r"no tensor for .* in the delta"):
        engine.apply_delta(delta_between(tmp_path / "2", few, few), version="1")
    assert engine.checksums(tensor_checksum) == before
    assert answer(engine).weight_versions == ["7"]
    engine.load_weights(changed.items(), version="0")  # other weights under the version that the delta begins from
    with pytest.raises(CheckpointError, match="does not match the delta's checksum"):
        engine.apply_delta(delta, version="1")
    assert not engine.has_weights
    engine.load_weights(tensors.items(), version="0")
    engine.apply_delta(delta, version="1")
    assert answer(engine).weight_versions == ["1"]


@pytest.mark.parametrize("retract", [False, True])
def test_a_pause_costs_nothing_but_time(retract: bool, make_engine: Make) -> None:
    engine = make_engine()
    expected = answer(engine, FREE)

    def pause() -> None:
        engine.pause("pause", retract=retract)
        steps = engine.stats.steps
        asyncio.get_running_loop().call_later(0.05, lambda: (rested.append(engine.stats.steps - steps), resume()))

    def resume() -> None:
        engine.resume("pause")

    rested: list[int] = []
    prefilled = engine.stats.prefill_tokens
    after = interrupted(engine, pause, FREE)
    assert rested == [0]
    assert after.tokens == expected.tokens
    assert after.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
    # Retracted, the prompt and the ten tokens written are computed anew.
    assert engine.stats.prefill_tokens - prefilled == len(PROMPT) * (1 + retract) + 10 * retract


def test_retracted_answers_see_the_new_weights_from_their_first_token_on(
    make_engine: Make, changed: Tensors, tensors: Tensors
) -> None:
    engine = make_engine()

    def push(retract: bool) -> Callable[[], None]:
        def pushed() -> None:
            engine.pause("pause", retract=retract)
            engine.load_weights(changed.items(), version="1")
            engine.resume("pause")

        return pushed

    anew = interrupted(engine, push(retract=True))
    assert anew.weight_versions == ["0", "1"]
    forced = asyncio.run(engine.generate(PROMPT + anew.tokens[:10], params=dataclasses.replace(GREEDY, max_tokens=50)))
    assert anew.tokens[10:] == forced.tokens
    engine.load_weights(tensors.items(), version="0")
    kept = interrupted(engine, push(retract=False))
    assert kept.tokens[:10] == anew.tokens[:10]
    assert kept.log_probs[11:] != pytest.approx(anew.log_probs[11:], abs=1e-4)  # keys and values of the old weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_in_any_order_make_the_same_engine_as_a_whole(
    dtype: torch.dtype, make_engine: Make, changed: Tensors
) -> None:
    engine, whole = make_engine(dtype=dtype), make_engine(dtype=dtype)
    whole.load_weights(changed.items(), version="7")
    names = sorted(changed, key=lambda name: name[::-1])  # q, k and v of one packed product come apart
    engine.begin_update()
    for start in range(0, len(names), 3):
        engine.update_weights([(name, changed[name]) for name in names[start : start + 3]], version="7")
    assert engine.weight_version == "0"
    engine.end_update()
    assert engine.weight_version == "7"
    assert (answer(engine).tokens, answer(engine).log_probs) == (answer(whole).tokens, answer(whole).log_probs)


def test_nothing_is_sampled_between_the_parts_and_new_requests_wait(
    make_engine: Make, changed: Tensors, tensors: Tensors
) -> None:
    engine = make_engine()
    items = list(changed.items())

    async def scene() -> Completion:
        engine.begin_update()
        engine.update_weights(items[:5], version="1")
        task = asyncio.create_task(engine.generate(PROMPT, params=GREEDY))
        await asyncio.sleep(0.02)
        assert engine.stats.steps == 0
        engine.update_weights(items[5:])
        engine.end_update()
        return await task

    assert asyncio.run(scene()).weight_versions == ["1"]


def test_an_update_with_tensors_missing_leaves_no_weights_until_they_come(make_engine: Make, tensors: Tensors) -> None:
    engine = make_engine()
    name = "model.layers.1.self_attn.q_proj.weight"
    expected = answer(engine).tokens

    async def torn() -> None:
        engine.begin_update()
        engine.update_weights([item for item in tensors.items() if item[0] != name], version="5")
        with pytest.raises(CheckpointError, match=r"no tensor for model\.layers\.1\.self_attn\.q_proj\.weight"):
            engine.end_update()

    asyncio.run(torn())
    assert not engine.has_weights
    with pytest.raises(BackendError, match="no weights"):
        answer(engine)
    engine.update_weights([(name, tensors[name])])
    assert (answer(engine).tokens, engine.weight_version) == (expected, "5")


def test_a_refused_part_changes_nothing(make_engine: Make, tensors: Tensors) -> None:
    engine = make_engine()
    expected = answer(engine).tokens
    name, other = "model.norm.weight", "model.layers.0.input_layernorm.weight"

    async def refused() -> None:
        engine.begin_update()
        for wrong in ((name, torch.zeros(3)), ("model.layers.9.mlp.up_proj.weight", torch.zeros(3))):
            with pytest.raises(CheckpointError):
                engine.update_weights([(other, torch.zeros(64)), wrong], version="1")
        engine.end_update()

    asyncio.run(refused())
    assert (answer(engine).tokens, engine.weight_version) == (expected, "0")


def test_a_single_tensor_may_change_on_its_own(make_engine: Make, tensors: Tensors) -> None:
    engine = make_engine()
    name = "model.layers.0.self_attn.k_proj.weight"
    engine.update_weights([(name, tensors[name] * 1.5)], version="1")
    whole = make_engine()
    whole.load_weights((tensors | {name: tensors[name] * 1.5}).items(), version="1")
    assert answer(engine).log_probs == answer(whole).log_probs
    assert engine.checksums(lambda tensor: str(tensor.sum().item()))[name] == str((tensors[name] * 1.5).sum().item())


def test_weights_may_come_in_parts_from_the_beginning(model_dir: Callable[[str], Path], tensors: Tensors) -> None:
    folder = model_dir("llama")
    engine = EmbeddedEngine(AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    items = list(tensors.items())
    engine.update_weights(items[:4], version="3")
    assert not engine.has_weights
    engine.update_weights(items[4:])
    assert answer(engine).weight_versions == ["3"]


def test_one_request_ends_and_the_others_go_on(make_engine: Make) -> None:
    engine = make_engine()
    expected = answer(engine, FREE).tokens

    async def scene() -> tuple[Completion, Completion, int]:
        seen: list[int] = []
        doomed = engine.request(PROMPT, GREEDY)
        doomed.grown = lambda: seen.append(len(doomed.tokens))
        engine.submit(doomed)
        other = asyncio.create_task(engine.generate(PROMPT, params=FREE))
        while len(doomed.tokens) < 10:
            await asyncio.sleep(0)
        engine.end(doomed)
        written = len(seen)
        assert seen == list(range(1, written + 1))
        return await doomed.future, await other, written

    ended, other, written = asyncio.run(scene())
    assert (ended.finish_reason, len(ended.tokens), len(ended.log_probs)) == ("abort", written, written)
    assert other.tokens == expected
    assert engine.running == engine.waiting == 0


def test_spans_say_which_version_wrote_which_tokens(make_engine: Make, tensors: Tensors) -> None:
    engine = make_engine()

    async def scene() -> list[tuple[str, int]]:
        sequence = engine.request(PROMPT, GREEDY)
        engine.submit(sequence)
        while len(sequence.tokens) < 10:
            await asyncio.sleep(0)
        engine.load_weights(tensors.items(), version="1")
        await sequence.future
        return sequence.spans

    assert asyncio.run(scene()) == [("0", 0), ("1", 10)]
