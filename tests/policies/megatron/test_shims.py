"""What stands between megatron-core and this machine: versions, the CPU, the absence of TransformerEngine."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import Any

import megatron_on_cpu
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, get_cuda_rng_tracker
from megatron.core.transformer.moe import moe_utils
from torch.distributed import distributed_c10d
from torch.distributed.tensor.debug import CommDebugMode

from slimectl.architectures.parallel import ParallelLayout
from slimectl.errors import BackendError, MissingExtraError
from slimectl.policies import onednn_linear
from slimectl.policies.megatron import parallel, patches

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim is for machines without CUDA")


@pytest.fixture
def alone():
    parallel.start(ParallelLayout(), seed=5)
    yield
    parallel.stop()


@on_cpu
def test_an_untested_version_is_refused_without_a_gpu(monkeypatch):
    monkeypatch.setattr(megatron_on_cpu, "version", lambda name: "0.18.0")
    with pytest.raises(
        BackendError, match=r"megatron-core 0\.18\.0 was not tested .*pip install 'megatron-core==0\.16\.1'"
    ):
        megatron_on_cpu.patch(param_and_grad_buffer)


@on_cpu
def test_without_a_gpu_and_the_shims_the_way_to_them_is_named(monkeypatch):
    parallel.stop()
    monkeypatch.delitem(sys.modules, "megatron_on_cpu")
    with pytest.raises(BackendError, match=r'train\.backend = "megatron": .*pip install \./tests/support/cpu$'):
        parallel.start(ParallelLayout(), seed=5)


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0"])
def test_an_unsupported_version_is_refused(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(BackendError, match=r"pip install 'megatron-core>=0\.16\.1,<0\.20'"):
        patches.prepare()


@pytest.mark.parametrize(("module", "package"), [("megatron", "megatron-core"), ("psutil", "psutil")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(module, package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    with pytest.raises(MissingExtraError, match=rf"needs {package}, .*pip install 'slimectl\[megatron\]'"):
        patches.prepare()


@pytest.mark.slow
def test_importing_warns_of_nothing_and_leaves_wandb_to_its_tracker():
    code = """import sys
import slimectl.policies.megatron.model
print("wandb" in sys.modules)
import wandb"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("False\n", "")


@on_cpu
def test_only_the_modules_of_megatron_core_see_another_torch():
    from megatron.core import tensor_parallel

    assert tensor_parallel.layers.torch.cpu.current_device() == torch.device("cpu")
    assert tensor_parallel.layers.torch.nn is torch.nn
    assert torch.cpu.current_device() == "cpu"
    assert torch.zeros(1).type() == "torch.FloatTensor"


@on_cpu
def test_groups_of_the_same_ranks_are_one(alone):
    assert parallel_state.get_tensor_model_parallel_group() is parallel_state.get_expert_data_parallel_group()
    assert len(distributed_c10d._world.pg_map) == 2  # that of the world, and this


@on_cpu
def test_a_forked_random_state_leaves_the_callers_alone_and_goes_on(alone):
    torch.manual_seed(3)
    plain = torch.rand(2)
    torch.manual_seed(3)
    with get_cuda_rng_tracker().fork():
        first = torch.rand(2)
    with get_cuda_rng_tracker().fork():
        second = torch.rand(2)
    assert torch.equal(torch.rand(2), plain)
    assert not torch.equal(first, plain)
    assert not torch.equal(first, second)


def test_the_routers_product_needs_no_transformer_engine():
    rows, matrix = torch.randn(3, 4), torch.randn(2, 4)
    product = moe_utils.router_gating_linear(rows, matrix, None, torch.float32)
    assert torch.allclose(product, rows @ matrix.T)


@on_cpu
def test_a_group_of_one_rank_exchanges_nothing_that_is_in_its_place(alone):
    group = parallel_state.get_data_parallel_group()
    values, copy = torch.arange(3.0), torch.zeros(3)
    for exchange in (param_and_grad_buffer.dist_reduce_scatter_func, param_and_grad_buffer.dist_all_gather_func):
        with CommDebugMode() as calls:
            exchange(values, values[:], group=group, async_op=False)
        assert (calls.get_total_counts(), values.tolist()) == (0, [0.0, 1.0, 2.0])
        with CommDebugMode() as calls:
            exchange(copy.zero_(), values, group=group, async_op=False)
        assert (calls.get_total_counts(), copy.tolist()) == (1, [0.0, 1.0, 2.0])


def test_gradients_are_measured_and_clipped_as_mcore_does_it():
    from megatron.core.utils import local_multi_tensor_scale

    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [12.0]])]
    norm_1, _ = patches._l2_norm(65536, torch.zeros(1), [gradients], False)
    assert norm_1.tolist() == [13.0]  # by hand: sqrt(9 + 16 + 144)
    expected, copies = [[g.clone() for g in gradients] for _ in range(2)]
    local_multi_tensor_scale(65536, torch.zeros(1), [expected, expected], 0.5)
    patches._scale(65536, torch.zeros(1), [gradients, copies], 0.5)
    patches._scale(65536, torch.zeros(1), [gradients, gradients], 0.5)
    for tensors in (gradients, copies):
        assert all(map(torch.equal, tensors, expected))


@on_cpu
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_onednn_gives_the_values_and_gradients_of_a_linear_layer(
    kind: Any, bias: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
):
    config = ModelParallelConfig(params_dtype=torch.float32, use_cpu_initialization=True)
    other = {"gather_output": False} if kind is ColumnParallelLinear else {"input_is_parallel": True}
    layer = kind(12, 20, config=config, init_method=torch.nn.init.normal_, bias=bias, skip_bias_add=False, **other)
    layer.weight.requires_grad_(not frozen)  # mcore gives a bias beside a frozen weight no gradient
    draw = torch.Generator().manual_seed(0)
    states, scale = torch.randn(64, 1, 12, generator=draw), torch.randn(64, 1, 20, generator=draw)
    calls: list[tuple[int, ...]] = []
    plain_product = onednn_linear.product

    def counted(*operands: Any) -> torch.Tensor:
        calls.append(tuple(operands[0].shape))
        return plain_product(*operands)

    def step(fast: bool) -> list[torch.Tensor | None]:
        monkeypatch.setattr(onednn_linear, "_has_unused_instructions", lambda: fast)
        rows, trained = states.clone().requires_grad_(), [part for part in layer.parameters() if part.requires_grad]
        output, _ = layer(rows)
        return [output, *torch.autograd.grad((output * scale).sum(), [rows, *trained], allow_unused=True)]

    monkeypatch.setattr(onednn_linear, "product", counted)
    plain = step(False)
    assert not calls
    torch.testing.assert_close(step(True), plain, rtol=1e-5, atol=1e-5)
    assert calls == [(64, 12), (64, 20), *([] if frozen else [(12, 64)])]
