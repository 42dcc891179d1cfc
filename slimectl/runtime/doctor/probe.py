"""Program of a child process: runs kernels and collective operations on the devices, and compares them with references.

A crash, a hang or an exhausted GPU then ends only the child. It prints a JSON line when it begins a check, and one with
the result. Shapes: B batch · H heads · T tokens · D head dimension · E experts · N rows · I inputs · O outputs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slimectl.algorithms.gated_delta import Chunks, gated_delta_rule
from slimectl.errors import first_line
from slimectl.system.listening import interface

TOLERANCE = 0.05
"""Allowed relative error of a kernel in bfloat16 against a reference in float32."""
JOIN_S = 60
"""Maximum seconds for all ranks to join and for one operation."""


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def describe() -> str:
    """Print versions and the devices on which CUDA starts. Return cuda or cpu."""
    report(begin="torch")
    error = ""
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as failed:
            error = str(failed).splitlines()[0]
    count = 0 if error or torch.version.cuda is None else torch.cuda.device_count()
    report(
        version=torch.__version__, cuda=torch.version.cuda, threads=torch.get_num_threads(), count=count, error=error,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if count else "",
    )  # fmt: skip
    return "cuda" if count else "cpu"


def kernels(gpus: int) -> None:
    """Print the largest relative error of outputs and gradients of every kernel, then the speed of GPUs.

    Prints none if there should be `gpus`, and CUDA does not find them.
    """
    device = describe()
    if gpus and device == "cpu":
        return
    checks: dict[str, Callable[[], float]] = {
        "attention": lambda: attention(device),
        "grouped GEMM": lambda: grouped_gemm(device),
    }
    if device == "cuda" and find_spec("fla") is not None:
        checks["linear attention"] = lambda: linear_attention(device)
    torch.manual_seed(0)
    for name, check in checks.items():
        report(begin=name)
        try:
            report(check=name, error=check(), tolerance=TOLERANCE)
        except Exception as failed:  # a kernel may raise anything
            report(check=name, problem=f"{type(failed).__name__}: {first_line(failed)}")
    if device == "cuda":
        report(begin="GPU speed")
        report(check="GPU speed", tflops=[matmul_tflops(index) for index in range(torch.cuda.device_count())])


def difference(kernel: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """Return the largest error of output and gradients, relative to the largest number of the reference."""
    results = []
    for function, dtype in ((kernel, torch.bfloat16), (reference, torch.float32)):
        leaves = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in inputs]
        output = function(*leaves)
        output.float().square().sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    pairs = [(ours.detach().float(), exact.detach()) for ours, exact in zip(*results, strict=True)]
    return max(float((ours - exact).abs().max() / exact.abs().max()) for ours, exact in pairs)


def attention(device: str) -> float:
    """Compare torch's fused causal attention with a softmax over all scores."""

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores: Tensor = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=device).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value

    inputs_BHTD = [torch.randn(2, 4, 128, 64, device=device).bfloat16() for _ in range(3)]
    return difference(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), exact, inputs_BHTD)


def grouped_gemm(device: str) -> float:
    """Compare torch's grouped product, as in mixtures of experts, with one product per expert."""
    sizes = [48, 0, 16, 64]
    ends_E = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    rows_NI = torch.randn(sum(sizes), 64, device=device).bfloat16()
    matrices_EIO = torch.randn(len(sizes), 64, 32, device=device).bfloat16()

    def exact(rows: Tensor, matrices: Tensor) -> Tensor:
        return torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes), matrices, strict=True)])

    return difference(lambda rows, matrices: F.grouped_mm(rows, matrices, offs=ends_E), exact, [rows_NI, matrices_EIO])


def linear_attention(device: str) -> float:
    """Compare the gated delta rule of flash-linear-attention with slimectl's."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    tokens, heads, width = 128, 2, 64
    decay_TH = -torch.rand(tokens, heads, device=device)
    beta_TH = torch.rand(tokens, heads, device=device)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = [part[None] for part in (F.normalize(query, dim=-1), F.normalize(key, dim=-1), value)]
        output: Tensor = chunk_gated_delta_rule(*parts, g=decay_TH[None], beta=beta_TH[None].to(value.dtype))[0]
        return output[0]

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        chunks = Chunks([tokens], query.device)
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        return gated_delta_rule(query * width**-0.5, key, value, decay_TH, beta_TH, chunks)[0]

    return difference(kernel, exact, [torch.randn(tokens, heads, width, device=device).bfloat16() for _ in range(3)])


def matmul_tflops(index: int, *, size: int = 8192, repeats: int = 10) -> float:
    """Return the speed of matrix products on one GPU."""
    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=f"cuda:{index}")
    torch.mm(matrix, matrix)
    torch.cuda.synchronize(index)
    started = time.perf_counter()
    for _ in range(repeats):
        torch.mm(matrix, matrix)
    torch.cuda.synchronize(index)
    return 2 * size**3 * repeats / (time.perf_counter() - started) / 1e12


def all_reduce(ranks: int, backend: str) -> None:
    """Print the seconds of a sum of numbers over all ranks, one process each. They are forked before CUDA starts."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    _join(rank, ranks, backend, Path(folder) / "store")
                except Exception as failed:
                    report(problem=f"rank {rank}: {type(failed).__name__}: {first_line(failed)}")
                finally:
                    os._exit(0)
            children.append(child)
        for rank, child in enumerate(children):
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code:
                report(problem=f"rank {rank} was killed by {signal.Signals(-code).name}")


def _join(rank: int, ranks: int, backend: str, store: Path) -> None:
    if name := interface("127.0.0.1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # as the ranks of a run do
    device = "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=JOIN_S)
    )
    numbers = torch.full((2**24 if backend == "nccl" else 2**20,), rank + 1.0, device=device)
    dist.all_reduce(numbers)
    expected = ranks * (ranks + 1) / 2
    if not bool((numbers == expected).all()):
        raise RuntimeError(f"the sum is {numbers[0].item()} instead of {expected}")
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(numbers)
    total = numbers.sum().item()  # waits for the device
    if rank == 0:
        report(seconds=time.perf_counter() - started, bytes=numbers.nbytes, total=total)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "kernels":
        kernels(int(sys.argv[2]))
    else:
        all_reduce(int(sys.argv[2]), sys.argv[3])
