"""slimectl doctor on a real GPU: the driver's report is read, and kernels and NCCL run."""

from __future__ import annotations

import pytest
import torch

from slimectl.runtime.doctor import checks
from slimectl.runtime.doctor.scope import Scope
from slimectl.settings import Settings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_kernels_and_nccl_run_and_the_report_has_what_is_read():
    scope = Scope(Settings())
    results = [result for _, result in checks.examine(scope)]
    broken = [str(result) for result in results if result.fine is False]
    assert not [line for line in broken if line.split()[1] in ("driver", "torch", "attention", "all_reduce")], broken
    assert {"driver", "GPUs", "free GPU memory", "attention", "GPU speed", "all_reduce"} <= {r.what for r in results}
    assert len(scope.gpus) >= torch.cuda.device_count()
    assert all(gpu.text("uuid") and gpu.text("persistence_mode") for gpu in scope.gpus)
