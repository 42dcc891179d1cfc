"""An adapter pushed alone: the bits of a merged push, a base model that is checked, refusals that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, random_rows

from slimectl.checkpoints.base_model import fingerprint
from slimectl.checkpoints.create import create_model
from slimectl.checkpoints.hf import HFCheckpoint, write_model
from slimectl.data.hashing import tensor_checksum
from slimectl.engines.api_keys import ServerKeys
from slimectl.engines.sglang.weight_client import SglangWorkers
from slimectl.engines.weight_sync.base import WeightSyncBase, cast
from slimectl.engines.weight_sync.distributed import DistributedSync
from slimectl.engines.weight_sync.memory import TensorSync
from slimectl.errors import BackendError
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.lora import LoraOptions
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions

ModelDir = Callable[..., Path]
TARGETS = ("q_proj", "up_proj", "down_proj")
Q = "model.layers.0.self_attn.q_proj"


def trained(folder: Path, *, rank: int = 4, targets: tuple[str, ...] = TARGETS) -> FsdpPolicy:
    """A policy whose adapter has learned something."""
    lora = LoraOptions(rank=rank, alpha=6.0, targets=targets)
    policy = FsdpPolicy(folder, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.02), lora=lora))
    policy.forward_backward(random_rows(), Clipped())
    policy.optim_step()
    return policy


def workers_of(server: Any) -> SglangWorkers:
    from engines.server.conftest import ADMIN_KEY

    return SglangWorkers([server.url], timeout_s=60, keys=ServerKeys(admin_api_key=ADMIN_KEY))


def checksums(policy: FsdpPolicy, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Those of the policy's merged weights, in the engine's precision."""
    return {name: tensor_checksum(tensor) for name, tensor in cast(policy.weights(), dtype)}


@pytest.fixture(scope="module")
def policy(model_dir: ModelDir) -> FsdpPolicy:
    return trained(model_dir("llama"))


@pytest.fixture
def sync(server: Any, policy: FsdpPolicy) -> Iterator[WeightSyncBase]:
    made = TensorSync(policy, workers_of(server), buffer_bytes=4000, adapters=True)  # several messages
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transport", [TensorSync, DistributedSync])
def test_a_server_that_waits_for_weights_gets_the_bits_of_the_merged_model(
    transport: Callable[..., WeightSyncBase], dtype: torch.dtype, serving: Any, policy: FsdpPolicy, model_dir: ModelDir
):
    with serving(model_dir("llama"), load=False, dtype=dtype) as server:
        workers = workers_of(server)
        sync = transport(policy, workers, buffer_bytes=4000, dtype=dtype, adapters=True)
        whole = sum(tensor.nbytes for _, tensor in policy.weights())
        assert 0 < sync.push()["bytes"] < whole / 3
        assert workers.checksums() == [checksums(policy, dtype)]
        assert server.good("/model_info")["weight_version"] == policy.weight_version
        sync.close()


def test_the_engine_gives_the_log_probabilities_of_the_trainer_after_every_push(
    server: Any, policy: FsdpPolicy, sync: WeightSyncBase
):
    for _ in range(2):
        sync.push()
        sampling = {"temperature": 1, "max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 3}
        prompt = list(b"once upon a time")
        answer = server.good("/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
        row = random_rows()[0]
        row.tokens, row.response_length = prompt + answer["output_ids"], 8
        (log_probs,) = policy.log_probs([row])
        engine_log_probs = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
        assert engine_log_probs == pytest.approx(log_probs, abs=1e-4)
        policy.forward_backward(random_rows(), Clipped())
        policy.optim_step()


def test_layers_that_an_adapter_has_no_more_are_those_of_the_base_model_again(
    server: Any, policy: FsdpPolicy, sync: WeightSyncBase, model_dir: ModelDir
):
    sync.push()
    fewer = trained(model_dir("llama"), rank=2, targets=("o_proj",))
    sync.policy = fewer
    sync.push()
    assert sync.workers.checksums() == [checksums(fewer)]


def test_an_adapter_after_whole_weights_brings_the_base_model_back(
    server: Any, policy: FsdpPolicy, sync: WeightSyncBase, model_dir: ModelDir, tmp_path: Path
):
    sync.push()
    other = FsdpPolicy(
        another_model(model_dir, tmp_path), HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.02))
    )
    TensorSync(other, sync.workers).push()
    sync.push()
    assert sync.workers.checksums() == [checksums(policy)]


def another_model(model_dir: ModelDir, folder: Path) -> Path:
    """A model of the same shape with other weights."""
    import json

    (folder / "other").mkdir()
    create_model(json.loads((model_dir("llama") / "config.json").read_text()), folder / "other", seed=8)
    return folder / "other"


def test_the_base_model_is_the_trainers_and_another_one_is_refused(
    server: Any, policy: FsdpPolicy, sync: WeightSyncBase, model_dir: ModelDir, tmp_path: Path
):
    """As after a supervised warm-up, whose model is in the run's folder."""
    folder = another_model(model_dir, tmp_path)
    sync.policy = on_another = trained(folder)
    sync.push()
    assert sync.workers.checksums() == [checksums(on_another)]
    folder.rename(tmp_path / "away")  # as on a machine without that folder, where the server has its own alone
    with pytest.raises(
        BackendError, match=r'is not the model that the adapter was trained on\. .* sync\.lora = "merged"'
    ):
        sync.push()
    assert sync.workers.checksums() == [checksums(on_another)]


def test_the_fingerprint_is_of_values_and_shows_one_step(policy: FsdpPolicy, model_dir: ModelDir, tmp_path: Path):
    folders = [tmp_path / name for name in ("same", "wide", "step")]
    whole = dict(HFCheckpoint().read(model_dir("llama")))
    moved = dict(FsdpPolicy(model_dir("llama"), HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions())).weights())
    moved["model.norm.weight"] = moved["model.norm.weight"] + 1e-6
    for folder, tensors in zip(folders, (whole, {n: t.double() for n, t in whole.items()}, moved), strict=True):
        folder.mkdir()
        write_model(model_dir("llama"), folder, tensors.items())
    same, wide, step = map(fingerprint, folders)
    assert same == wide == fingerprint(model_dir("llama")) != step


def parts(policy: FsdpPolicy) -> dict[str, torch.Tensor]:
    return dict(policy.adapter().tensors)


def push_parts(sync: WeightSyncBase, policy: FsdpPolicy, tensors: dict[str, torch.Tensor]) -> None:
    """Push these tensors as the policy's adapter."""
    with sync.paused(sync.workers):
        sync.workers.expect_adapter(policy.adapter())
        sync.workers.load_tensors(list(tensors.items()), version="9")


def test_parts_that_do_not_fit_are_refused_in_a_line_and_change_nothing(
    server: Any, policy: FsdpPolicy, sync: WeightSyncBase
):
    sync.push()
    before, good = sync.workers.checksums(), parts(policy)
    a, b = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
    nowhere = {name.replace("layers.0", "layers.7"): tensor for name, tensor in good.items()}
    wrong = {
        r"q_proj\.lora_A\.weight has shape \[3, \d+\] in float32, expected \[4, \d+\]": good | {a: good[a][:3]},
        r"q_proj\.lora_B\.weight has shape \[\d+, 4\] in int32, expected .* in float32": good | {b: good[b].int()},
        r"layers\.7\.\S+ is not an adapter of a layer of ": good | nowhere,
        r"model\.norm\.weight is not an adapter": good | {"model.norm.weight": torch.zeros(3)},
        r"5 of the adapter's 6 layers are complete\. Push it again": {n: t for n, t in good.items() if n != b},
    }
    for message, tensors in wrong.items():
        with pytest.raises(BackendError, match=message) as refusal:
            push_parts(sync, policy, tensors)
        assert "\n" not in str(refusal.value)
        assert sync.workers.checksums() == before
        assert server.good("/model_info")["weight_version"] == policy.weight_version
    sync.push()


def test_a_session_that_a_dead_trainer_left_open_does_not_keep_the_next_push_away(
    server: Any, policy: FsdpPolicy, sync: WeightSyncBase
):
    first = next(iter(parts(policy).items()))
    for leave_open in (lambda: server.good("/begin_weight_update", {}), lambda: half_push(sync, policy, first)):
        leave_open()
        sync.push()
        assert sync.workers.checksums() == [checksums(policy)]
    half_push(sync, policy, first)
    TensorSync(policy, sync.workers).push()
    assert sync.workers.checksums() == [checksums(policy)]


def half_push(sync: WeightSyncBase, policy: FsdpPolicy, part: tuple[str, torch.Tensor]) -> None:
    workers = SglangWorkers(sync.workers.urls, keys=sync.workers._keys)  # type: ignore[attr-defined]
    workers.expect_adapter(policy.adapter())
    workers.load_tensors([part], version="8")


def test_one_request_takes_an_adapter_as_a_whole(server: Any, policy: FsdpPolicy, sync: WeightSyncBase):
    workers = sync.workers
    workers.expect_adapter(policy.adapter())
    block = workers._shared_block(list(parts(policy).items()))  # type: ignore[attr-defined]
    adapter = {**workers._adapter, "base": None}  # type: ignore[attr-defined]  # the server's own folder
    body = {"load_format": "shared_memory", **block, "weight_version": "5"}
    server.good("/update_weights_from_tensor", body | {"adapter": adapter})
    assert workers.checksums() == [checksums(policy)]
    assert server.good("/model_info")["weight_version"] == "5"
    status, answer = server.ask("/update_weights_from_tensor", body | {"adapter": adapter | {"rank": 0}})
    assert (status, answer["error"]["message"]) == (400, "adapter.rank: 0 is not between 1 and 65536")
