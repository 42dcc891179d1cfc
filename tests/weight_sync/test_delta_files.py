"""A delta brings a checkpoint from one version to the next, byte for byte, or leaves it as it was."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.data.atomic_replace import write_text
from slimectl.engines.weight_sync import delta as delta_module
from slimectl.engines.weight_sync.delta import VERSION, apply_delta, weight_version, write_delta
from slimectl.engines.weight_sync.delta_format import DeltaFile, Versions, checksum, difference, tensor_ranges
from slimectl.errors import CheckpointError
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.cluster import SyncSettings
from slimectl.system import deltas
from slimectl.system.deltas import RoundingComparer

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
SHAPES: list[list[int]] = [[], [0, 3], [1], [3], [17], [2, 5], [300], [3, 4, 5]]
Weights = dict[str, Tensor]


def numbers(draw: random.Random, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Any bits at all, NaNs and infinities among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    most = 1 if dtype is torch.bool else 255
    data = bytearray(draw.randint(0, most) for _ in range(size))
    return (
        torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
    )


def changed(draw: random.Random, tensor: Tensor, share: float) -> Tensor:
    """The tensor with about that share of its bytes drawn anew."""
    other = numbers(draw, tensor.dtype, list(tensor.shape))
    if not tensor.numel():
        return other
    keep = torch.tensor([draw.random() >= share for _ in range(tensor.nbytes)])
    mixed = torch.where(keep, *(each.reshape(-1).view(torch.uint8) for each in (tensor, other)))
    return mixed.view(tensor.dtype).view(tensor.shape)


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[Weights, Weights]:
    """Tensors of any form, and what they become."""
    forms = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), min_size=1, max_size=6))
    chance = random.Random(draw(st.integers(0, 2**32)))
    before = {f"model.{i}": numbers(chance, dtype, shape) for i, (dtype, shape) in enumerate(forms)}
    share = draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    return before, {name: changed(chance, tensor, share) for name, tensor in before.items()}


def checkpoint(folder: Path, weights: Weights, version: str, *, shard_bytes: int = 400) -> Path:
    folder.mkdir()
    HFCheckpoint(max_shard_bytes=shard_bytes).write(folder, weights.items())
    write_text(folder / VERSION, version + "\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != VERSION}


def delta(folder: Path, base: Path, weights: Weights) -> Path:
    """From version 1, which `base` holds, to these weights, version 2."""
    target = folder / "1-to-2.delta"
    size = write_delta(iter(weights.items()), target=target, base=base, versions=Versions("1", "2"), dtype=None)
    assert size == target.stat().st_size
    return target


def patched(folder: Path, change: Path) -> dict[str, bytes]:
    """Bytes of each tensor of a checkpoint after the changes that a delta lists, worked out number by number."""
    delta_file, values = DeltaFile(change), dict[str, bytes]()
    for name, region in tensor_ranges(folder).items():
        numbers_N = region.mapped({}).copy().view(f"<u{region.width}")
        place = -1
        for gap, bits in zip(*delta_file.gaps(name, region.width), strict=True):
            place += int(gap) + 1
            numbers_N[place] ^= bits
        values[name] = numbers_N.tobytes()
    return values


@settings(max_examples=60, deadline=None)
@given(versions=two_versions())
def test_a_delta_makes_the_new_files_of_the_old_byte_for_byte(versions: tuple[Weights, Weights]):
    with tempfile.TemporaryDirectory() as name:
        old = checkpoint(Path(name, "old"), versions[0], "1")
        new = checkpoint(Path(name, "new"), versions[1], "2")
        change = delta(Path(name), old, versions[1])
        expected = {tensor: region.mapped({}).tobytes() for tensor, region in tensor_ranges(new).items()}
        assert patched(old, change) == expected
        apply_delta(old, DeltaFile(change))
        assert contents(old) == contents(new)
        assert weight_version(old) == "2"
        with pytest.raises(CheckpointError, match=r"does not hold weights 1\. Push whole weights"):
            apply_delta(old, DeltaFile(change))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_numbers_that_differ_are_found_in_every_place_of_a_word(dtype: torch.dtype):
    size = 50  # of which the last do not fill a word
    for index in range(size):
        old = torch.zeros(size, dtype=dtype)
        new = old.clone()
        new[index] = 1
        each = difference(*(tensor.view(torch.uint8).numpy() for tensor in (old, new)), dtype.itemsize, first=1000)
        assert each.indices_C.tolist() == [1000 + index]
        assert each.xor_C.tobytes() == new[index : index + 1].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100, 2048, 5000])
def test_rounded_numbers_are_compared_as_by_torch(size: int):
    """Numbers of any bits, infinities and NaNs among them."""
    chance = torch.Generator().manual_seed(size)
    numbers_N = torch.randint(-(2**31), 2**31, (size,), dtype=torch.int32, generator=chance).view(torch.float32)
    numbers_N[::7] = torch.tensor([float("nan"), float("-inf"), 0.0]).repeat(size)[: len(numbers_N[::7])]
    rounded_N = numbers_N.bfloat16()
    old_N = rounded_N.view(torch.int16).clone()
    old_N[::3] ^= 1
    comparer = RoundingComparer(5000)
    if not comparer.exists:
        pytest.skip("no C compiler, or not Linux on x86-64")
    new, indices_C, xor_C = comparer.compare(numbers_N, old_N.numpy().view("<u2"), first=1000)
    expected_N = rounded_N.view(torch.int16).numpy().view("<u2")
    assert new.tolist() == expected_N.tolist()
    assert indices_C.tolist() == list(range(1000, 1000 + size, 3))
    assert xor_C.tolist() == (old_N.numpy().view("<u2") ^ expected_N)[::3].tolist()


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("gap_width", [1, 2, 4, 8])
def test_numbers_change_alike_with_and_without_a_compiler(
    gap_width: int, width: int, compiler: bool, monkeypatch: pytest.MonkeyPatch
):
    if not compiler:
        monkeypatch.setattr(deltas, "_library", lambda: None)
    numbers_N = np.arange(300).astype(f"<u{width}")
    bits_C = np.array([1, 2, 3, 4], f"<u{width}")
    indices_C = deltas.change_numbers(numbers_N, np.array([0, 3, 0, 250], f"<u{gap_width}"), bits_C)
    assert indices_C.tolist() == [0, 4, 5, 256]
    expected_N = np.arange(300).astype(f"<u{width}")
    for index, bits in zip(indices_C, bits_C, strict=True):
        expected_N[index] ^= bits
    assert numbers_N.tolist() == expected_N.tolist()


def rounded_delta(folder: Path, old: Weights, new: Weights) -> dict[str, bytes]:
    """Files of a delta from bfloat16 to float32 weights, which are rounded, and of the checkpoint that it makes."""
    folder.mkdir()
    base = checkpoint(
        folder / "base", {name: tensor.bfloat16() for name, tensor in old.items()}, "1", shard_bytes=10**8
    )
    target = folder / "1-to-2.delta"
    write_delta(iter(new.items()), target=target, base=base, versions=Versions("1", "2"), dtype=torch.bfloat16)
    apply_delta(base, DeltaFile(target))
    return contents(base) | {"delta": target.read_bytes()}


def test_deltas_of_rounded_weights_are_equal_with_and_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    old = {"a": torch.randn(1_100_000), "b": torch.randn(33, 3), "c": torch.randn(0, 2)}  # the first in two chunks
    new = {name: tensor * (1 + 0.01 * (torch.rand(tensor.shape) < 0.02)) for name, tensor in old.items()}
    first = rounded_delta(tmp_path / "compiler", old, new)
    monkeypatch.setattr(deltas, "_library", lambda: None)
    assert first == rounded_delta(tmp_path / "none", old, new)
    rounded = {name: tensor.bfloat16() for name, tensor in new.items()}
    assert dict(HFCheckpoint().read(tmp_path / "none" / "base"))["a"].equal(rounded["a"])


def damage(folder: Path, name: str, *, byte: int) -> None:
    """Flip all bits of one byte of a tensor."""
    region = tensor_ranges(folder)[name]
    with region.file.open("rb+") as stream:
        stream.seek(region.start + byte)
        old = stream.read(1)[0]
        stream.seek(region.start + byte)
        stream.write(bytes([old ^ 255]))


def test_a_delta_of_a_damaged_base_still_names_the_checksum_of_the_undamaged_bytes(tmp_path: Path):
    weights = {"a": torch.arange(100, dtype=torch.float32)}
    base = checkpoint(tmp_path / "base", weights, "1", shard_bytes=10_000)
    for version in (2, 3):
        before = checksum(weights["a"].numpy().tobytes()).hexdigest()
        if version == 3:
            damage(base, "a", byte=4 * 50)
        weights = {"a": weights["a"] + (torch.arange(100) == version)}
        target, versions = tmp_path / f"{version}.delta", Versions(str(version - 1), str(version))
        write_delta(iter(weights.items()), target=target, base=base, versions=versions, dtype=None)
        apply_delta(base, DeltaFile(target))
        assert DeltaFile(target).changes["a"].before == before  # an engine that has other bytes refuses the delta
    assert dict(HFCheckpoint().read(base))["a"].equal(weights["a"])  # the damage is a change like any other


def test_the_checksum_is_that_of_the_algorithm():
    assert checksum().hexdigest() == "99aa06d3014798d86001c324468d497f"
    parts = checksum()
    for part in (b"a ", b"del", b"ta"):
        parts.update(part)
    assert checksum(b"a delta").hexdigest() == parts.hexdigest()


@pytest.mark.parametrize("name", ["update_weight_delta_encoding", "update_weight_delta_checksum"])
def test_every_value_of_the_settings_is_accepted_and_means_the_same_delta(name: str, tmp_path: Path):
    choices = get_args(SyncSettings.model_fields[name].annotation)
    policy, workers = Mock(), Mock(urls=["http://127.0.0.1:1"])
    made = []
    for value in choices:
        given = Settings.model_validate({"sync": {"transport": "delta", name: value}, "engine": {"num_engines": 2}})
        sync = builders.to_servers(given, policy, workers, model=tmp_path, folder=tmp_path)
        made.append((type(sync), sync.dtype, sync.folder))
    assert len(choices) > 1
    assert made == [made[0]] * len(choices)


class PowerCut(Exception):
    pass


def cut_after(tensors: int) -> Callable[..., Any]:
    """A `change_numbers` that changes so many tensors more, and fails in the middle of the next one."""
    left = [tensors]

    def cut(numbers_N: Any, gaps_C: Any, bits_C: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            return deltas.change_numbers(numbers_N, gaps_C, bits_C)
        half = len(gaps_C) // 2
        deltas.change_numbers(numbers_N, gaps_C[:half], bits_C[:half])
        raise PowerCut

    return cut


@settings(max_examples=30, deadline=None)
@given(versions=two_versions(), cut=st.integers(0, 4))
def test_what_was_torn_in_the_middle_is_not_passed_off_as_a_version(versions: tuple[Weights, Weights], cut: int):
    with tempfile.TemporaryDirectory() as name:
        old = checkpoint(Path(name, "old"), versions[0], "1")
        new = checkpoint(Path(name, "new"), versions[1], "2")
        change = delta(Path(name), old, versions[1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delta_module, "change_numbers", cut_after(cut))
            try:
                apply_delta(old, DeltaFile(change))
            except PowerCut:
                assert weight_version(old) is None
                with pytest.raises(CheckpointError, match=r"does not hold weights 1\. Push whole weights"):
                    delta(Path(name), old, versions[1])
            else:
                assert contents(old) == contents(new)
                assert weight_version(old) == "2"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    weights = {"a": torch.arange(100, dtype=torch.float32), "b": torch.ones(50, dtype=torch.bfloat16)}
    return checkpoint(tmp_path / "base", weights, "1", shard_bytes=10_000)


@pytest.fixture
def change(tmp_path: Path, base: Path) -> Path:
    weights = {"a": torch.arange(100, dtype=torch.float32).sqrt(), "b": torch.ones(50, dtype=torch.bfloat16) * 2}
    return delta(tmp_path, base, weights)


def test_no_delta_is_written_from_another_version(base: Path, tmp_path: Path):
    write_text(base / VERSION, "7\n")
    with pytest.raises(CheckpointError, match=r"does not hold weights 1\. Push whole weights"):
        delta(tmp_path, base, {"a": torch.zeros(100), "b": torch.ones(50, dtype=torch.bfloat16)})


@pytest.mark.parametrize("kind", ["cut short", "a byte of the list of tensors", "empty", "missing"])
def test_a_damaged_delta_is_refused(change: Path, kind: str):
    data = bytearray(change.read_bytes())
    data[-40] ^= 1
    change.write_bytes({"cut short": change.read_bytes()[:-9], "empty": b""}.get(kind, bytes(data)))
    if kind == "missing":
        change.unlink()
    with pytest.raises(CheckpointError, match=r"1-to-2\.delta"):
        DeltaFile(change)


def test_a_damaged_byte_of_the_numbers_is_found_by_bounds_or_checksum(base: Path, tmp_path: Path):
    weights = {"a": torch.arange(100, dtype=torch.float32).sqrt(), "b": torch.ones(50, dtype=torch.bfloat16) * 2}
    change = delta(tmp_path, base, weights)
    whole, regions = change.read_bytes(), tensor_ranges(base)
    spans = [span for each in DeltaFile(change).changes.values() for span in (each.gaps, each.values)]
    for byte in (place for start, size, _ in spans for place in range(start, start + size, 5)):
        change.write_bytes(whole[:byte] + bytes([whole[byte] ^ 255]) + whole[byte + 1 :])
        delta_file, matches = DeltaFile(change), []
        for name, region in regions.items():
            try:
                gaps_C, bits_C = delta_file.gaps(name, region.width)
            except CheckpointError:
                matches.append(False)
                continue
            numbers_N = region.mapped({}).copy().view(bits_C.dtype)
            deltas.change_numbers(numbers_N, gaps_C, bits_C)
            matches.append(delta_file.matches(name, numbers_N))
        assert matches.count(False) == 1, byte


def test_no_delta_is_written_for_other_tensors_than_the_base_has(tmp_path: Path, base: Path):
    for weights, words in [
        ({"a": torch.zeros(100)}, "b is not among the new weights"),
        ({"a": torch.zeros(100), "b": torch.ones(50)}, "b has another shape or dtype there"),
        ({"a": torch.zeros(100), "c": torch.ones(50)}, "c has another shape or dtype there"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            delta(tmp_path, base, weights)
    assert [file.name for file in tmp_path.iterdir()] == ["base"]


def test_what_did_not_change_takes_no_room(tmp_path: Path):
    weights = {"a": torch.randn(100_000).bfloat16()}
    base = checkpoint(tmp_path / "base", weights, "1", shard_bytes=10**6)
    assert delta(tmp_path, base, weights).stat().st_size < 400
    few = {"a": weights["a"].clone()}
    few["a"][::1000] *= 2  # 100 of 100 000 numbers
    assert delta(tmp_path, base, few).stat().st_size < 1500
