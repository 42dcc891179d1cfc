"""Our model's own description for mcore's checkpoints: the keys that conversions write, and numbers that come back."""

from __future__ import annotations

import pytest
import torch
from megatron.core import dist_checkpointing
from model_cases import load, parameters_of, reference
from torch.distributed.checkpoint import FileSystemReader

from slimectl.architectures.parallel import ParallelLayout
from slimectl.architectures.registry import family_of
from slimectl.architectures.torch_dist_keys import tensors
from slimectl.policies.megatron import parallel
from slimectl.policies.megatron.model import build
from slimectl.policies.options import MegatronOptions, TrainerOptions

pytestmark = pytest.mark.slow

ALONE = ParallelLayout()


@pytest.fixture(autouse=True)
def groups():
    parallel.start(ALONE, seed=1)
    yield
    parallel.stop()


@pytest.mark.parametrize("name", ["llama_tied", "qwen2_moe", "deepseek_v3", "minimax_m2"])
def test_mcore_saves_and_loads_the_model_under_the_names_that_conversions_use(name, tmp_path):
    hf = reference(name, tmp_path)
    architecture = family_of(hf.config).architecture(hf.config)
    (saved,) = build(architecture, TrainerOptions(), MegatronOptions())
    load([saved], hf, ALONE)
    folder = tmp_path / "torch_dist"
    folder.mkdir()
    dist_checkpointing.save(saved.sharded_state_dict(), str(folder))

    stored = {key for key in FileSystemReader(folder).read_metadata().state_dict_metadata if "_extra_state" not in key}
    assert stored == set(tensors(hf.links, architecture))

    (loaded,) = build(architecture, TrainerOptions(), MegatronOptions())
    loaded.load_state_dict(dist_checkpointing.load(loaded.sharded_state_dict(), str(folder)))
    numbers = dict(parameters_of([loaded]))
    for parameter_name, value in parameters_of([saved]):
        assert torch.equal(numbers[parameter_name], value), parameter_name
