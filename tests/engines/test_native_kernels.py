"""The engine's kernels in C compute what torch's operators do, and an engine works without a compiler."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slimectl.architectures.qwen_next import Sizes
from slimectl.engines.embedded.delta_net import DeltaNet, Recall
from slimectl.engines.embedded.linear import Linear, Storage
from slimectl.engines.embedded.native import SOURCE, DeltaWeights, Kernels, SpanTable, load_kernels
from slimectl.engines.embedded.prefix_tree import CachedSpan
from slimectl.engines.embedded.states import SlotStates
from slimectl.engines.embedded.weights import Weights
from slimectl.system import compiler
from slimectl.types import SamplingParams

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture(params=[(), ("-mno-avx512f",)], ids=["all instructions", "without AVX-512"])
def kernels(dtype: torch.dtype, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if request.param and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("the processor has no AVX-512 to do without")
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, *request.param))
    kernels = load_kernels.__wrapped__(dtype)
    if kernels is None:
        pytest.skip("no C compiler, or not Linux on x86-64")
    torch.manual_seed(0)
    return kernels


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def test_norms_are_those_of_torch(kernels: Kernels, dtype: torch.dtype) -> None:
    rows_NE, weight_E = torch.randn(3, 48).to(dtype), torch.rand(48).to(dtype)
    close(kernels.rms_norm(rows_NE, weight_E, 1e-5), F.rms_norm(rows_NE.float(), (48,), weight_E.float(), 1e-5))
    qkv_NHD, weight_HD = torch.randn(2, 5, 16).to(dtype), torch.rand(3, 16).to(dtype)
    expected = qkv_NHD.float()
    expected[:, :3] = F.rms_norm(expected[:, :3], (16,), eps=1e-5) * weight_HD.float()
    kernels.norm_heads(qkv_NHD, weight_HD, 1e-5)
    close(qkv_NHD, expected)
    offset_E = (weight_E / 100).to(dtype)  # 1 + this has no exact value in bfloat16
    expected = F.rms_norm(rows_NE.float(), (48,), 1 + offset_E.float(), 1e-5)
    close(kernels.rms_norm(rows_NE, offset_E, 1e-5, 1.0), expected)


@pytest.mark.parametrize("width", [32, 16])
def test_rotation_leaves_values_and_the_rest_of_heads_alone(kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    qkv_NHD = torch.randn(3, 4, 32).to(dtype)
    cos_N1R, sin_N1R = torch.rand(2, 3, 1, width).to(dtype)
    expected = qkv_NHD.float()
    rotated = expected[:, :3, :width]
    expected[:, :3, :width] = rotated * cos_N1R.float() + rotated.roll(width // 2, -1) * sin_N1R.float()
    kernels.rotate(qkv_NHD, 3, cos_N1R, sin_N1R)
    close(qkv_NHD, expected)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 6])
def test_attention_reads_spans_and_slots_and_no_token_behind_the_new_one(
    kernels: Kernels, dtype: torch.dtype, head_dim: int, group: int
) -> None:
    rows, kv_heads, tokens, layers = 3, 2, 19, 2
    heads = kv_heads * group
    cache = torch.full((2, 4, kv_heads, tokens, head_dim), float("nan"), dtype=dtype)
    positions_N = torch.tensor([16, 3, 0])
    for row, position in enumerate(positions_N.tolist()):
        cache[:, row, :, :position] = torch.randn(2, kv_heads, position, head_dim).to(dtype)
    prefix = torch.randn(layers, 2, kv_heads, 11, head_dim).to(dtype)
    spans = [
        CachedSpan(prefix[:, :, :, 7:], torch.tensor([0, 2]), 7, 11),
        CachedSpan(prefix[:, :, :, :7], slice(0, 3), 0, 7),
    ]
    qkv_NHD = torch.randn(rows, heads + 2 * kv_heads, head_dim).to(dtype)
    for shared, lengths in ((SpanTable([], rows), (0, 0, 0)), (SpanTable(spans, rows), (11, 7, 11))):
        scratch = kernels.attention_scratch(cache, heads, shared)
        out = kernels.attend(1, qkv_NHD, cache, positions_N, shared, scratch)
        for row, (position, length) in enumerate(zip(positions_N.tolist(), lengths, strict=True)):
            slot = cache[:, row, :, : position + 1]
            assert torch.equal(slot[:, :, position].flatten(0, 1), qkv_NHD[row, heads:])
            keys, values = torch.cat((prefix[1, :, :, :length], slot), 2).float()
            query = qkv_NHD[row, :heads, None].float()
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            close(out[row], F.scaled_dot_product_attention(query, keys, values).flatten())


def test_delta_nets_are_those_of_torch(kernels: Kernels, dtype: torch.dtype) -> None:
    """Prompts of several lengths, then steps that go on from their states, in two layers and with a free slot."""
    sizes, storage = Sizes(key_heads=2, value_heads=6, key_dim=32, value_dim=80), Storage(dtype, CPU)
    parts = (torch.randn(shape).to(dtype) for shape in ((sum(sizes.blocks[:3]), 1, 4), (6,), (6,), (80,)))
    weights = DeltaWeights(2, *parts, eps=1e-6)
    net = DeltaNet(sizes, Linear(8, [8], storage), None, weights, Linear(8, [8], storage))
    slots = [SlotStates(2, sizes, 4, dtype=dtype, device=CPU) for _ in range(2)]
    for states in slots:
        states.reserve(4, 0)
    for lengths in ([2, 70, 5], [1, 1, 1], [1, 1, 1]):
        passes = [Recall(states, lengths, given) for states, given in zip(slots, (kernels, None), strict=True)]
        for _ in range(2):
            projected_NO = torch.randn(sum(lengths), sum(sizes.blocks)).to(dtype)
            compiled, plain = (recall(net, projected_NO) for recall in passes)
            close(compiled, plain)
        close(slots[0].memory, slots[1].memory)
        assert torch.equal(slots[0].inputs, slots[1].inputs)
    assert not slots[0].memory[:, 3].any()


def test_spans_change_no_digit(kernels: Kernels, dtype: torch.dtype) -> None:
    """A row that reads a prompt in place gets what it would from a copy of it in its slot."""
    prefix = torch.randn(1, 2, 2, 13, 32).to(dtype)
    own = torch.randn(2, 1, 2, 20, 32).to(dtype)
    qkv_1HD = torch.randn(1, 8, 32).to(dtype)
    whole = torch.cat((prefix[0][:, None], own), 3)
    results = []
    for cache, position, spans in ((whole, 21, []), (own, 8, [CachedSpan(prefix, slice(0, 1), 0, 13)])):
        shared, slots = SpanTable(spans, 1), cache.clone()
        scratch = kernels.attention_scratch(slots, 4, shared)
        results.append(kernels.attend(0, qkv_1HD, slots, torch.tensor([position]), shared, scratch))
    assert torch.equal(*results)


@pytest.mark.parametrize("rows", [1, 6, 7, 12, 13, 50, 101])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_torch(kernels: Kernels, dtype: torch.dtype, rows: int, bias: bool) -> None:
    layers = []
    for outputs, gates in (([21], False), ([48, 48], True), ([24, 24], True)):
        for with_kernels in (kernels, None):
            layer = Linear(40, outputs, Storage(dtype, CPU, with_kernels), bias=bias, gates=gates)
            layer.write(0, torch.randn(sum(outputs), 40, generator=torch.Generator().manual_seed(1)))
            if layer.bias_O is not None:
                layer.bias_O.copy_(torch.arange(sum(outputs)) / 10)
            layer.refresh()
            layers.append(layer)
    plain, plain_reference, gated, gated_reference, narrow, narrow_reference = layers
    rows_NI, residual_NO = torch.randn(rows, 40).to(dtype), torch.randn(rows, 21).to(dtype)
    close(plain(rows_NI) / 10, plain_reference(rows_NI) / 10)
    close(plain.added_to(residual_NO, rows_NI) / 10, plain_reference.added_to(residual_NO, rows_NI) / 10)
    close(gated.gated(rows_NI) / 100, gated_reference.gated(rows_NI) / 100)
    close(narrow.gated(rows_NI) / 100, narrow_reference.gated(rows_NI) / 100)


def in_panels(weight_OI: torch.Tensor, kernels: Kernels, *, gates: bool) -> torch.Tensor:
    """The numbers of a weight in the order of its panels, by torch's operators."""
    outputs, inputs = weight_OI.shape
    width, step = kernels.panel_outputs, kernels.step
    if gates:
        weight_OI = weight_OI[torch.arange(outputs).view(2, -1, width // 2).transpose(0, 1).flatten()]
    padded = F.pad(weight_OI, (0, 0, 0, -outputs % width))
    return padded.view(-1, width, inputs // step, step).transpose(1, 2).flatten()


SHAPES = [(21, 40, False), (37, 22, False), (300, 250, False), (96, 40, True), (64, 6, True), (2048, 80, True)]


@pytest.mark.parametrize(("outputs", "inputs", "gates"), SHAPES)
@pytest.mark.parametrize("parts", [1, 3])
def test_panels_hold_every_weight_once(
    dtype: torch.dtype, kernels: Kernels, outputs: int, inputs: int, gates: bool, parts: int
) -> None:
    """Whole or part by part, as elements or as float32 numbers that are rounded; and they can be read again."""
    exact_OI = torch.randn(outputs, inputs)
    exact_OI[0, :3] = torch.tensor([float("nan"), float("inf"), 1e-42])
    weight_OI = exact_OI.to(dtype)
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for rows_OI in (weight_OI, exact_OI):
        panels = kernels.new_panels(outputs, inputs, bias=False, gated=gates)
        first = 0
        for rows_RI in rows_OI.chunk(parts):
            kernels.pack(rows_RI, panels, first)
            first += len(rows_RI)
        assert torch.equal(panels.numbers.view(bits), in_panels(weight_OI, kernels, gates=gates).view(bits))
        assert torch.equal(kernels.unpack(panels, 3, outputs - 5).view(bits), weight_OI[3:-2].view(bits))
    if not gates:
        outputs_N = torch.tensor([outputs - 1, 0, 17, 17])
        assert torch.equal(kernels.gather(panels, outputs_N).view(bits), weight_OI[outputs_N].view(bits))


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("changes", [1, 7, 900])
def test_panels_follow_the_numbers_of_a_weight_that_changed(
    kernels: Kernels, dtype: torch.dtype, gates: bool, changes: int
) -> None:
    layer = Linear(40, [64, 64], Storage(dtype, CPU, kernels), bias=True, gates=gates)
    weight_OI = torch.randn(128, 40).to(dtype)
    layer.write(0, weight_OI)
    indices_C = torch.randperm(60 * 40)[:changes].sort().values
    rows_RI = layer.read(64, 60)
    assert torch.equal(rows_RI, weight_OI[64:124])
    rows_RI.view(-1)[indices_C] += 1
    layer.change(64, rows_RI, indices_C)
    weight_OI[64:124].view(-1)[indices_C] += 1
    assert torch.equal(layer.read(0, 128), weight_OI)


def test_gates_are_those_of_torch_for_large_and_small_inputs(kernels: Kernels, dtype: torch.dtype) -> None:
    gates = torch.cat((torch.linspace(-100, 100, 64), torch.ones(64)))[None].to(dtype)
    close(kernels.silu_product(gates), F.silu(gates[:, :64].float()))


def test_a_row_does_not_depend_on_those_beside_it(kernels: Kernels, dtype: torch.dtype) -> None:
    panels = kernels.new_panels(32, 40, bias=False, gated=False)
    kernels.pack(torch.randn(32, 40).to(dtype), panels)
    rows_NI = torch.randn(50, 40).to(dtype)
    together = kernels.product(rows_NI, panels)
    assert torch.equal(together[17:18], kernels.product(rows_NI[17:18], panels))


def test_the_number_of_threads_changes_no_digit(kernels: Kernels, dtype: torch.dtype) -> None:
    panels = kernels.new_panels(100, 40, bias=False, gated=False)
    kernels.pack(torch.randn(100, 40).to(dtype), panels)
    rows_NI, qkv_NHD = torch.randn(50, 40).to(dtype), torch.randn(5, 10, 16).to(dtype)
    cache, positions_N = torch.randn(2, 5, 2, 20, 16).to(dtype), torch.arange(5) + 12
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            shared = SpanTable([], 5)
            scratch = kernels.attention_scratch(cache, 6, shared)
            attended = kernels.attend(0, qkv_NHD, cache, positions_N, shared, scratch)
            results.append((kernels.product(rows_NI, panels), attended))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


def test_an_engine_without_kernels_says_the_same(make_engine: Callable[..., Any], answers: Callable[..., Any]) -> None:
    request = (list(b"once upon"), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    (first,), (second,) = (answers(make_engine(compile_kernels=each), request) for each in (True, False))
    assert first.tokens == second.tokens
    assert first.log_probs == pytest.approx(second.log_probs, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_whole_blocks_change_no_digit(
    make_engine: Callable[..., Any],
    answers: Callable[..., Any],
    dtype: torch.dtype,
    family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if load_kernels(dtype) is None:
        pytest.skip("no C compiler, or not Linux on x86-64")
    requests = [
        (list(text), SamplingParams(temperature=1.0, seed=i, max_tokens=9 + i, ignore_eos=True))
        for i, text in enumerate((b"once", b"upon a time", b"there was"))
    ]
    calls: list[int] = []
    decode = Kernels.decode
    monkeypatch.setattr(Kernels, "decode", lambda *arguments: (calls.append(1), decode(*arguments))[1])
    whole = answers(make_engine(family, dtype=dtype), *requests)
    assert calls
    monkeypatch.setattr(Weights, "block_addresses", lambda weights: None)
    count = len(calls)
    single = answers(make_engine(family, dtype=dtype), *requests)
    assert len(calls) == count
    assert [each.tokens for each in whole] == [each.tokens for each in single]
    assert [each.log_probs for each in whole] == [each.log_probs for each in single]


def test_blocks_stay_where_they_are_when_weights_change(make_engine: Callable[..., Any], dtype: torch.dtype) -> None:
    engine = make_engine("qwen2", dtype=dtype)
    weights = engine._runner.model.weights
    before = weights.block_addresses()
    if before is None:
        pytest.skip("no C compiler, or not Linux on x86-64")
    engine.load_weights([(name, tensor + 1) for name, tensor in weights.tensors()], version="1")
    assert torch.equal(weights.block_addresses(), before)


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_kernels.__wrapped__(torch.float32) is None


def test_kernels_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: Kernels) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compiler.compiled(SOURCE)
    monkeypatch.setattr(subprocess, "run", None)
    assert compiler.compiled(SOURCE) == first
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_library_that_others_could_have_written_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "slimectl" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_kernels.__wrapped__(torch.float32) is None


def test_a_user_without_a_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compiler.Path, "home", homeless)
    assert load_kernels.__wrapped__(torch.float32) is None
