"""The way of a push: how many files of slimectl it enters, in the process that has the weights."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import serving
from transformers import AutoConfig, AutoTokenizer

import slimectl
from slimectl.algorithms.losses import SftLoss
from slimectl.checkpoints.hf import HFCheckpoint, write_model
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.weight_sync.base import InProcessSync, WeightSynchronizer
from slimectl.engines.weight_sync.delta import DeltaSync
from slimectl.engines.weight_sync.disk import DiskSync
from slimectl.engines.weight_sync.distributed import DistributedSync
from slimectl.engines.weight_sync.memory import TensorSync
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.lora import LoraOptions
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.rank_group import LockedPolicy
from slimectl.protocols import Policy, WeightSync
from slimectl.types import SamplingParams, TrainingSample

PACKAGE = Path(slimectl.__file__).parent
PROMPT = list(b"once upon a time")


def functions_entered(call: Callable[[], object]) -> dict[str, set[str]]:
    """Functions of slimectl that are called meanwhile, in any thread, by the file that defines them."""
    entered: dict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and path.is_relative_to(PACKAGE):
            entered[str(path.relative_to(PACKAGE))].add(frame.f_code.co_qualname)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return dict(entered)


def train(policy: Policy) -> None:
    policy.forward_backward([TrainingSample(tokens=PROMPT, response_length=8, loss_weights=[1 / 8] * 8)], SftLoss())
    policy.optim_step()


def files_of_second_push(sync: WeightSync, policy: Policy, sample: Callable[[], object]) -> set[str]:
    """Files that a push enters when the engines have sampled, and the policy has been trained, since another one."""
    synchronizer = WeightSynchronizer(sync, policy)
    synchronizer.push()
    sample()
    train(policy)
    files = set(functions_entered(synchronizer.push))
    assert synchronizer.version == policy.weight_version
    synchronizer.close()
    return files


@pytest.fixture(scope="module")
def folder(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("llama")


@pytest.fixture(scope="module")
def trainer(folder: Path) -> FsdpPolicy:
    return FsdpPolicy(folder, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.02)))


@pytest.fixture(scope="module")
def adapted(folder: Path) -> FsdpPolicy:
    lora = LoraOptions(rank=4, alpha=8.0, targets=("q_proj",))
    return FsdpPolicy(folder, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.02), lora=lora))


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = serving.serve(folder, tmp_path_factory.mktemp("logs"))
    yield server.start()
    server.stop()


def test_a_push_into_the_engine_of_this_process_enters_at_most_eleven_files(folder: Path, trainer: FsdpPolicy):
    engine = EmbeddedEngine(AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    sample = partial(engine.generate, PROMPT, params=SamplingParams(max_tokens=2))
    files = files_of_second_push(InProcessSync(trainer, engine), trainer, lambda: asyncio.run(sample()))
    kernels = {"engines/embedded/native.py"}  # where the processor packs weights with them
    assert files - kernels == {
        "engines/weight_sync/base.py", "policies/fsdp/trainer.py",
        "engines/embedded/engine.py", "engines/embedded/weight_loader.py", "engines/embedded/weights.py",
        "engines/embedded/linear.py",
        "engines/embedded/runner.py", "engines/embedded/prefix_tree.py",
        "architectures/family.py", "system/liveness.py", "system/timeline.py",
    }  # fmt: skip


TO_SERVERS = {
    "engines/weight_sync/base.py", "policies/rank_group.py", "policies/fsdp/trainer.py",
    "engines/http/weight_client.py", "engines/sglang/weight_client.py", "system/http.py",
    "system/event_loop.py", "system/liveness.py", "system/timeline.py",
}  # fmt: skip
"""Files of every push to servers, beside the transport's."""

CHECKPOINT = {"engines/weight_sync/disk.py", "checkpoints/hf.py", "checkpoints/safetensors_io.py",
              "system/model_files.py", "data/atomic_replace.py", "data/ownership.py"}  # fmt: skip
DELTA = {"engines/weight_sync/delta.py", "engines/weight_sync/delta_format.py",
         "system/deltas.py", "data/atomic_replace.py", "data/io.py", "errors.py"}  # fmt: skip
MEMORY = {"engines/weight_sync/memory.py"}
BROADCAST = {"engines/weight_sync/distributed.py", "engines/weight_sync/process_groups.py"}


@pytest.mark.parametrize(
    ("transport", "files"),
    [(TensorSync, MEMORY), (DistributedSync, BROADCAST), (DiskSync, CHECKPOINT), (DeltaSync, DELTA)],
)
def test_a_push_to_servers_enters_nine_files_and_those_of_its_transport(
    transport: Callable[..., WeightSync], files: set[str], folder: Path, trainer: FsdpPolicy, url: str, tmp_path: Path
):
    policy, options = LockedPolicy(trainer), {}
    if transport in (DiskSync, DeltaSync):
        options = {"folder": tmp_path, "write": partial(write_model, folder)}
    sync = transport(policy, serving.workers([url]), **options)
    compiler = {"system/compiler.py"}  # where this process has not loaded its kernels before
    assert files_of_second_push(sync, policy, lambda: None) - compiler == TO_SERVERS | files


@pytest.mark.parametrize(("transport", "files"), [(TensorSync, MEMORY), (DistributedSync, BROADCAST)])
def test_a_push_of_an_adapter_enters_no_file_more(
    transport: Callable[..., WeightSync], files: set[str], adapted: FsdpPolicy, url: str
):
    sync = transport(LockedPolicy(adapted), serving.workers([url]), adapters=True)
    assert files_of_second_push(sync, adapted, lambda: None) == TO_SERVERS | files
