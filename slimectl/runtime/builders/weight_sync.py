"""Builds the transports of weight sync from settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from slimectl.architectures.config import read_config
from slimectl.errors import CheckpointError, SettingsError
from slimectl.hooks import FlatSettings, hook
from slimectl.protocols import Policy, WeightUpdateClient
from slimectl.runtime.builders.engines import engine_backend
from slimectl.runtime.builders.models import device, served_model
from slimectl.runtime.builders.trainers import policy_backend
from slimectl.settings import Settings
from slimectl.settings.engine import EngineSettings
from slimectl.settings.secret import reveal, revealed_score
from slimectl.system import shared_memory

if TYPE_CHECKING:
    from slimectl.engines.http.weight_client import HttpWorkers
    from slimectl.engines.weight_sync.base import Precision, WeightSyncBase

LOCAL = ("127.0.0.1", "localhost", "::1")


def urls(engine: EngineSettings) -> list[str]:
    """Return the addresses of engine.url, with secrets revealed."""
    return list(reveal(engine.url, setting="engine.url"))


def keyed(settings: Settings) -> Settings:
    """Return the settings with all server secrets revealed, and an admin key for servers that will be started.

    The recipient may run elsewhere, in another environment. These settings are never written to a file.
    """
    from slimectl.engines.api_keys import new_key

    engine = settings.engine
    args = reveal(settings.sglang.args, setting="sglang.args")
    vllm_args = reveal(settings.vllm.args, setting="vllm.args")
    server_args = engine_backend(settings).server_args(settings)
    groups = reveal(settings.sglang.server_groups, setting="sglang.server_groups")
    keys = {}
    for name in ("api_key", "admin_api_key"):
        key = reveal(getattr(engine, name), setting=f"engine.{name}")
        keys[name] = None if key is None else SecretStr(key)
    starts = settings.uses_servers and not engine.url
    if starts and keys["admin_api_key"] is None and not server_args.get("admin_api_key"):
        keys["admin_api_key"] = SecretStr(new_key())
    return settings.model_copy(
        update={
            "engine": engine.model_copy(update=keys),
            "sglang": settings.sglang.model_copy(update={"args": args, "server_groups": groups}),
            "vllm": settings.vllm.model_copy(update={"args": vllm_args}),
            "score": revealed_score(settings.score),
        }
    )


def workers(settings: Settings, urls: Sequence[str]) -> HttpWorkers:
    """Build the engines' side of a push."""
    return engine_backend(settings).workers(settings, urls)


def to_servers(
    settings: Settings, policy: Policy, receivers: WeightUpdateClient, *, model: Path, folder: Path,
    rank_of: Callable[[str], int | None] | None = None,
) -> WeightSyncBase:  # fmt: skip
    """Build the transport of sync.transport. Its files go to sync.update_weight_disk_dir, or below `folder`.

    `rank_of` returns the rank that shares the GPU of the engine at an address, if any. Raises SettingsError.
    """
    from slimectl.checkpoints.hf import write_model
    from slimectl.engines.weight_sync.delta import DeltaSync
    from slimectl.engines.weight_sync.disk import DiskSync
    from slimectl.engines.weight_sync.distributed import DistributedSync
    from slimectl.engines.weight_sync.memory import TensorSync
    from slimectl.engines.weight_sync.verify import VerifiedSync

    model = served_model(settings.engine, model)
    sync, dtype = settings.sync, pushed_precision(settings, model)
    files = Path(sync.update_weight_disk_dir or folder / "weights").absolute()
    write = partial(write_model, model.absolute())
    adapters = _pushes_adapters(settings, receivers)
    name = sync.transport
    if name == "auto":
        all_local = all(urlsplit(url).hostname in LOCAL for url in receivers.urls)
        shares = shared_memory.is_writable() if receivers.shares_memory else adapters
        by_broadcast = not adapters or "distributed" in receivers.adapter_transports
        is_near = all_local and shares and settings.cluster.actor_num_nodes == 1
        name = "tensor" if _shares_gpus(settings) or is_near or not by_broadcast else "distributed"
    options: dict[str, Any] = {"pause_mode": sync.pause_mode, "dtype": dtype}
    if name in ("disk", "delta"):
        options |= {"folder": files, "write": write, "keep_files": sync.update_weight_disk_keep_files}
        options["wrote"] = _post_write_hook(settings)
    else:
        options |= {"buffer_bytes": sync.update_weight_buffer_size * 2**20, "adapters": adapters}
    if name == "distributed":
        options["timeout_s"] = sync.timeout_s
    if name == "tensor" and rank_of is not None and _shares_gpus(settings):
        options["rank_of"] = partial(_rank_beside, rank_of)
    kinds = {"tensor": TensorSync, "distributed": DistributedSync, "disk": DiskSync, "delta": DeltaSync}
    transport: WeightSyncBase = kinds[name](policy, receivers, **options)
    if not sync.check_weight_update_equal:
        return transport
    return VerifiedSync(transport, folder=files, write=write, dtype=dtype)


def check_transport(settings: Settings) -> None:
    """Raise SettingsError for a sync.transport that cannot reach the engines from GPUs."""
    transport, shares = settings.sync.transport, _shares_gpus(settings)
    if transport == "distributed" and shares:
        raise SettingsError(
            "sync.transport: distributed, but nccl does not connect engines to a trainer on the same GPUs. Drop it."
        )
    on_gpu = device(settings.train.device) == device(settings.engine.device) == "cuda"
    sends_weights = settings.train.lora_rank is None or settings.sync.lora == "merged"
    if transport == "tensor" and on_gpu and sends_weights and not shares and settings.engine.backend == "sglang":
        raise SettingsError(
            "sync.transport: tensor, but SGLang can open only memory of its own GPUs, which the trainer does not share."
            " Drop it, or set cluster.colocate = true."
        )


def _shares_gpus(settings: Settings) -> bool:
    """Return whether engines are on GPUs of the trainer. NCCL refuses to broadcast between processes of one GPU."""
    import torch

    if device(settings.engine.device) != "cuda" or device(settings.train.device) != "cuda":
        return False
    return settings.cluster.colocate or (bool(settings.engine.url) and torch.cuda.device_count() == 1)


def _rank_beside(rank_of: Callable[[str], int | None], url: str) -> int:
    """Return the rank on the GPU of an engine. Raises SettingsError if there is none."""
    rank = rank_of(url)
    if rank is None:
        raise SettingsError(
            f"cluster.rollout_num_gpus: no training rank shares the GPU of the engine at {url}, so it would get no"
            " weights. With cluster.colocate, engines can use only the GPUs of the trainer."
        )
    return rank


def needs_shared_memory(transport: WeightSyncBase) -> bool:
    """Return whether a transport reaches only engines on this machine."""
    from slimectl.engines.weight_sync.memory import TensorSync

    return isinstance(getattr(transport, "sync", transport), TensorSync)


def adapter_obstacle(settings: Settings) -> str | None:
    """Return why servers get merged weights of a policy with adapters, or None if they get only adapters.

    Raises SettingsError if sync.lora requires adapters nevertheless.
    """
    sync, names = settings.sync, engine_backend(settings).adapter_transports
    obstacle = None
    if sync.lora == "merged":
        return 'sync.lora = "merged"'
    if not names:
        obstacle = f"servers of engine.backend = {settings.engine.backend} do not accept adapters"
    elif not policy_backend(settings.train).streams_adapters:
        obstacle = f"policies of train.backend = {settings.train.backend} cannot export only the adapter"
    elif sync.transport not in ("auto", *names):
        obstacle = f"engines accept adapters only through sync.transport = {' or '.join(names)}"
    elif settings.engine.load is not None:
        obstacle = "the weights of engine.load are not the base model's"
    elif settings.cluster.colocate and device(settings.engine.device) == "cuda":
        obstacle = "engines that share GPUs with the trainer lose the base model when they sleep"
    elif sync.check_weight_update_equal and device(settings.train.device) != device(settings.engine.device):
        obstacle = "sync.check_weight_update_equal compares bits, and GPU products differ in the last bits"
    if obstacle is not None and sync.lora == "adapter":
        raise SettingsError(f"sync.lora: adapter is not possible: {obstacle}. Set it to auto or merged.")
    return obstacle


def _pushes_adapters(settings: Settings, receivers: WeightUpdateClient) -> bool:
    """Return whether pushes contain only the adapter. Raises SettingsError if sync.lora requires it in vain."""
    if settings.train.lora_rank is None or adapter_obstacle(settings) is not None:
        return False
    if settings.sync.transport in ("auto", *receivers.adapter_transports) and receivers.adapter_transports:
        return True
    if settings.sync.lora == "adapter":
        raise SettingsError(
            f"sync.lora: adapter is not possible: servers at {', '.join(receivers.urls)} do not accept it. Set it to "
            "auto or merged."
        )
    return False


def pushed_precision(settings: Settings, folder: Path) -> Precision:
    """Return the precision of pushed weights: engine.load's at `folder` if it is quantized, else engine.dtype.

    Raises CheckpointError for an unsupported quantization, and SettingsError for one that needs another dtype.
    """
    import torch

    from slimectl.checkpoints.hf_weights import HFWeights
    from slimectl.checkpoints.quantization import QuantizedStream
    from slimectl.checkpoints.quantization_config import scheme_of
    from slimectl.checkpoints.quantization_schemes import Fp8Blocks, Fp8Scale

    dtype: torch.dtype = getattr(torch, settings.engine.dtype)
    scheme = scheme_of(read_config(folder)) if settings.engine.load else None
    if scheme is None:
        return dtype
    if not isinstance(scheme, Fp8Blocks | Fp8Scale):
        raise CheckpointError(
            f"engine.load: {folder} is in 4 bits, which weight updates do not support. Use an fp8 model."
        )
    if dtype == torch.float32:
        raise SettingsError("engine.dtype: float32, but fp8 servers compute in bfloat16. Add engine.dtype = bfloat16.")
    return QuantizedStream(HFWeights(folder).forms(), scheme, dtype)


def _post_write_hook(settings: Settings) -> Callable[[Path, WeightUpdateClient], None] | None:
    """Return the user's function that is called after files are written, or None without one."""
    user_fn, args = hook(settings, "sync.custom_post_write_path"), FlatSettings(settings)
    if user_fn is None:
        return None
    return lambda path, receivers: user_fn(
        {"args": args, "settings": args, "version_dir": path, "rollout_engines": receivers}
    )
