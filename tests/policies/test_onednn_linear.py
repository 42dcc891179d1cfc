"""Float32 products by oneDNN: the numbers of torch's own linear layer, its gradients, and where they are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from slimectl.policies import onednn_linear
from slimectl.policies.onednn_linear import is_faster, use_onednn
from slimectl.policies.pack_plan import AttentionSpan, PackPlan

CPU = torch.device("cpu")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 12), (1, 5, 12)], ids=str)
def test_outputs_and_gradients_are_those_of_the_plain_layer(shape: tuple[int, ...], bias: bool):
    torch.manual_seed(0)
    plain = nn.Linear(12, 20, bias=bias)
    model = nn.Sequential(nn.Linear(12, 20, bias=bias))
    model[0].load_state_dict(plain.state_dict())
    use_onednn(model)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    weights = torch.randn(*shape[:-1], 20)
    outputs = [layer(rows) for layer, rows in zip((plain, model), inputs, strict=True)]
    for output in outputs:
        (output * weights).sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close(model[0].weight.grad, plain.weight.grad)
    if bias:
        torch.testing.assert_close(model[0].bias.grad, plain.bias.grad)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_a_frozen_weight_gets_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    use_onednn(model)
    model[0].weight.requires_grad_(False)
    rows = torch.randn(3, 4, requires_grad=True)
    model(rows).sum().backward()
    assert model[0].weight.grad is None
    assert rows.grad is not None
    assert model[1].weight.grad is not None


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_a_product_is_added_in_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(onednn_linear, "SUM_ROWS", 4)
    draw = torch.Generator().manual_seed(0)
    total, left, right = (torch.randn(shape, generator=draw) for shape in ((10, 3), (6, 10), (6, 3)))
    expected = total + left.t() @ right
    onednn_linear.add_product(total, left, right)
    torch.testing.assert_close(total, expected)


def test_only_an_amd_processor_with_avx_512_computes_float32_by_onednn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    has_unused = onednn_linear._has_unused_instructions.__wrapped__
    for vendor in ("AuthenticAMD", "GenuineIntel"):
        (tmp_path / vendor).write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    assert has_unused(tmp_path / "AuthenticAMD") == wide
    assert not has_unused(tmp_path / "GenuineIntel")
    assert not has_unused(tmp_path / "missing")
    monkeypatch.setattr(onednn_linear, "_has_unused_instructions", lambda: True)
    assert is_faster(CPU, torch.float32)
    assert not is_faster(CPU, torch.bfloat16)
    assert not is_faster(torch.device("cuda"), torch.float32)


def test_a_pack_is_padded_by_a_sequence_that_nothing_attends_to():
    span = AttentionSpan(0, 5, np.zeros(0, dtype=np.int64))
    tokens = np.arange(5)
    layout = PackPlan([0], [], tokens, tokens, [span], tokens[:2], tokens[:2], tokens[:2], [tokens])
    assert layout.padded(5) is layout
    padded = layout.padded(4)
    assert padded.tokens_T.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert padded.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert [(each.start, each.length, len(each.context)) for each in padded.spans] == [(0, 5, 0), (5, 3, 0)]
    assert padded.sources_R is layout.sources_R
