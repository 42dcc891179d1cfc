"""Engine backends for SGLang and vLLM, which run as servers in their own Python environments."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slimectl.errors import CheckpointError, SettingsError
from slimectl.runtime.builders.engines import EngineBackend, keys, server_options
from slimectl.runtime.builders.models import device
from slimectl.settings import Settings
from slimectl.system.model_files import policy_folder

if TYPE_CHECKING:
    from slimectl.engines.http.api import ServerApi
    from slimectl.engines.http.weight_client import HttpWorkers
    from slimectl.engines.sglang.topology import ServerSpec
    from slimectl.engines.supervisor.installed import Installation, InstalledServer
    from slimectl.engines.supervisor.server_process import ServerProcess


ROUTING_OPTION = "enable_return_routed_experts"
"""Option that makes both kinds of servers report the experts of every token."""


class InstalledBackend(EngineBackend):
    """A backend whose settings section has `python`, its interpreter, and `args`, its own options."""

    memory_option: ClassVar[str]
    """Option that lets a server release memory while the trainer runs."""

    def installed(self) -> InstalledServer:
        """Return the description of the installed library."""
        raise NotImplementedError

    def check(self, settings: Settings) -> None:
        if settings.cluster.executor != "local":
            return  # the machines that start them report it
        library = self.installed()
        python = library.interpreter(getattr(settings, library.section).python)
        for spec in self.specs(settings, Path("model")):
            library.flags(spec.args, python)

    def examine(self, settings: Settings, *, has_gpu: bool) -> Installation:
        self.check(settings)
        library = self.installed()
        return library.examine(getattr(settings, library.section).python, has_gpu=has_gpu)

    def server_args(self, settings: Settings) -> Mapping[str, Any]:
        args: dict[str, Any] = getattr(settings, self.installed().section).args
        memory = {self.memory_option: True} if settings.cluster.colocate else {}
        return memory | ({ROUTING_OPTION: True} if settings.train.use_rollout_routing_replay else {}) | args


class SglangBackend(InstalledBackend):
    """SGLang servers, configured in [sglang]."""

    default_router = "cache_aware"
    adapter_transports = ("tensor",)
    memory_option = "enable_memory_saver"
    tokenizer_option = "tokenizer_path"

    def installed(self) -> InstalledServer:
        from slimectl.engines.sglang.launch import SGLANG

        return SGLANG

    def specs(self, settings: Settings, model: Path) -> list[ServerSpec]:
        from slimectl.engines.sglang.topology import groups_of

        return groups_of(
            model,
            num_engines=settings.num_engines,
            gpus_per_engine=settings.cluster.rollout_num_gpus_per_engine,
            prefill_num_servers=settings.sglang.prefill_num_servers,
            server_groups=settings.sglang.server_groups,
            gpus_per_node=settings.cluster.num_gpus_per_node,
            args=self.server_args(settings),
        )

    def check(self, settings: Settings) -> None:
        super().check(settings)
        if settings.cluster.executor == "local":
            from slimectl.engines.sglang.disaggregation import check_transfer

            specs = self.specs(settings, Path("model"))
            python = self.installed().interpreter(settings.sglang.python)
            check_transfer(
                specs[0].args, python, device=device(settings.engine.device), roles=[spec.role for spec in specs]
            )

    def server(self, settings: Settings, spec: ServerSpec, *, log: Path, waiting: bool) -> ServerProcess:
        from slimectl.engines.sglang.launch import sglang_server

        options = server_options(settings, spec, log=log, waiting=waiting)
        return sglang_server(spec, options, python=settings.sglang.python)

    def meeting_flags(self, address: str) -> Sequence[str]:
        return [f"--dist-init-addr={address}"]

    def reporting_api(self, *, layers: int, choices: int) -> ServerApi:
        from slimectl.engines.sglang.api import SglangApi

        return SglangApi(routed_experts=(layers, choices))


class VllmBackend(InstalledBackend):
    """vLLM servers, configured in [vllm]."""

    adapter_transports = ("tensor", "distributed")
    memory_option = "enable_sleep_mode"
    tokenizer_option = "tokenizer"

    def check(self, settings: Settings) -> None:
        _require_gpu_for_routing(settings)
        _refuse_trainer_state(settings.engine.load or settings.model.path)
        super().check(settings)

    def installed(self) -> InstalledServer:
        from slimectl.engines.vllm.launch import VLLM

        return VLLM

    def server(self, settings: Settings, spec: ServerSpec, *, log: Path, waiting: bool) -> ServerProcess:
        from slimectl.engines.vllm.launch import vllm_server

        _require_gpu_for_routing(settings)
        options = server_options(settings, spec, log=log, waiting=waiting)
        verifies = settings.sync.check_weight_update_equal
        return vllm_server(spec, options, python=settings.vllm.python, keep_weights=verifies)

    def workers(self, settings: Settings, urls: Sequence[str]) -> HttpWorkers:
        from slimectl.engines.vllm.weight_client import VllmWorkers

        return VllmWorkers(urls, timeout_s=settings.sync.timeout_s, keys=keys(settings))

    def api(self) -> ServerApi:
        from slimectl.engines.vllm.api import VllmApi

        return VllmApi()

    def reporting_api(self, *, layers: int, choices: int) -> ServerApi:
        from slimectl.engines.vllm.api import VllmApi

        return VllmApi(routed_experts=True)


def _refuse_trainer_state(model: str | None) -> None:
    """Raise CheckpointError for a checkpoint of an earlier version, whose optimizer vLLM would load as weights."""
    folder = policy_folder(Path(model or ""))
    if (folder / "model.safetensors.index.json").exists():
        return  # vLLM loads the files that it lists
    for name in ("optimizer.safetensors", "value_head.safetensors"):
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder / name}: written by an earlier version of slimectl next to the weights. vLLM would load it "
                f"as weights. Copy the model without it: slimectl convert {shlex.quote(str(folder))} DIR --to hf"
            )


def _require_gpu_for_routing(settings: Settings) -> None:
    """Reject replaying the routing of vLLM on a CPU, where its model runner (0.32.0) does not report experts."""
    if settings.train.use_rollout_routing_replay and device(settings.engine.device) == "cpu":
        raise SettingsError(
            "train.use_rollout_routing_replay: vLLM reports experts only on a GPU. Set engine.backend to embedded or "
            "sglang."
        )
