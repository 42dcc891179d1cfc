"""Weights cut into messages and read to their end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slimectl.engines.weight_sync.base import buckets, cast, drained, in_progress_version
from slimectl.engines.weight_sync.distributed import own_address
from slimectl.errors import BackendError

FLOAT_BYTES = 4


def stream(*sizes: int) -> Iterator[tuple[str, Tensor]]:
    for i, size in enumerate(sizes):
        yield f"t{i}", torch.zeros(size)


def test_messages_are_full_but_not_too_full_and_the_last_says_so():
    cut = list(buckets(stream(2, 3, 5, 20, 1, 1), 6 * FLOAT_BYTES))
    assert [[name for name, _ in message] for message, _ in cut] == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]
    assert [last for _, last in cut] == [False, False, False, True]
    assert list(buckets(stream(), 10)) == []


def test_only_a_whole_set_bears_the_version():
    assert [in_progress_version("7", last=last) for last in (False, True)] == ["7-incomplete", "7"]


def test_wide_floats_are_cast_and_nothing_else():
    tensors = {
        "weight": torch.ones(2),
        "double": torch.ones(2, dtype=torch.float64),
        "ids": torch.ones(2, dtype=torch.int64),
        "fp8": torch.ones(2).to(torch.float8_e4m3fn),
        "mlp.gate.e_score_correction_bias": torch.ones(2),
    }
    found = {name: tensor.dtype for name, tensor in cast(tensors.items(), torch.bfloat16)}
    assert found == {
        "weight": torch.bfloat16,
        "double": torch.bfloat16,
        "ids": torch.int64,
        "fp8": torch.float8_e4m3fn,
        "mlp.gate.e_score_correction_bias": torch.float32,
    }
    assert {name: tensor.dtype for name, tensor in cast(tensors.items(), None)} == {
        name: tensor.dtype for name, tensor in tensors.items()
    }


def test_a_stream_is_read_to_its_end_whatever_happens():
    left = stream(1, 1, 1)

    def fails_after_one() -> None:
        with drained(left) as tensors:
            raise ZeroDivisionError(next(tensors)[0])

    with pytest.raises(ZeroDivisionError, match="t0"):
        fails_after_one()
    assert next(left, None) is None


def test_the_trainer_is_reached_on_the_loopback_by_its_own_machine_only():
    assert own_address(["http://127.0.0.1:1", "http://localhost:2", "http://127.8.9.1:3"]) == "127.0.0.1"
    try:
        away = own_address(["http://127.0.0.1:1", "http://192.0.2.7:2"])
    except BackendError:
        pytest.skip("this machine has no network")
    assert not away.startswith("127.")
