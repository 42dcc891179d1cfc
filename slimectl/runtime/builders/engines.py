"""Engine backends by the name in engine.backend: one engine in this process, or servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from slimectl.architectures.config import raw_config
from slimectl.chats.model_tokens import end_tokens
from slimectl.data.images import processor_of
from slimectl.data.routed_experts import NO_EXPERTS
from slimectl.errors import CheckpointError, SettingsError, SlimectlError, first_line
from slimectl.plugins.registry import ENGINES
from slimectl.runtime.builders.backends import backend
from slimectl.runtime.builders.executors import executor_backend
from slimectl.runtime.builders.models import device, is_torch_dist, version_of
from slimectl.settings import Settings
from slimectl.settings.secret import reveal
from slimectl.system.model_files import policy_folder

if TYPE_CHECKING:
    from slimectl.engines.api_keys import ServerKeys
    from slimectl.engines.embedded.engine import EngineOptions
    from slimectl.engines.embedded.model_interface import SequenceModel
    from slimectl.engines.http.api import ServerApi
    from slimectl.engines.http.weight_client import HttpWorkers
    from slimectl.engines.sglang.topology import ServerSpec
    from slimectl.engines.supervisor.installed import Installation
    from slimectl.engines.supervisor.server_process import ServerOptions, ServerProcess


NO_EXPERTS_FROM_TRANSFORMERS = (
    "train.use_rollout_routing_replay: the engine does not report experts of models that transformers computes. Set it "
    "to false, or set engine.backend to sglang or vllm."
)


class EngineBackend:
    """Base class of engine backends. Other packages derive from it, with a constructor without arguments.

    A backend for an engine in the caller's process overrides `engine`. A backend for servers overrides `server` and
    everything that differs from SGLang's HTTP API.
    """

    in_process: ClassVar[bool] = False
    """Whether a single engine runs in the caller's process and is created by `engine`."""

    default_router: ClassVar[str] = "none"
    """Meaning of engine.router = "auto" for several servers: a policy of sglang-router, or none."""

    tokenizer_option: ClassVar[str] = ""
    """Server flag for the folder of the tokenizer."""

    takes_router: ClassVar[bool] = True
    """Whether sglang-router forwards requests to its servers."""

    reads_torch_dist: ClassVar[bool] = False
    """Whether it reads a model directory in Megatron's layout. Otherwise the model is converted first."""

    adapter_transports: ClassVar[Sequence[str]] = ()
    """Transports through which its servers accept only a LoRA adapter. Empty if they need all weights."""

    settings_class: ClassVar[type[BaseModel] | None] = None
    """Class of the engine's own settings section, which has the engine's name. None if there is none."""

    def check(self, settings: Settings) -> None:
        """Check that it can be started here, before anything is built. Raises BackendError or SettingsError."""

    def examine(self, settings: Settings, *, has_gpu: bool) -> Installation | None:
        """Import its library in the Python that runs it. None if it has no own one. Raises the errors of `check`."""
        if not self.in_process:
            self.check(settings)
        return None

    def engine(self, settings: Settings, folder: Path, tokenizer: Any, *, load: bool) -> Any:
        """Create the engine of a model directory, which is an Engine and a WeightReceiver.

        Without `load`, the weights are not read, and the first push sets them.
        """
        raise NotImplementedError

    def specs(self, settings: Settings, model: Path) -> list[ServerSpec]:
        """Return the specification of every server in the settings."""
        from slimectl.engines.sglang.topology import groups_of

        return groups_of(
            model,
            num_engines=settings.num_engines,
            gpus_per_engine=settings.cluster.rollout_num_gpus_per_engine,
            args=self.server_args(settings),
        )

    def server_args(self, settings: Settings) -> Mapping[str, Any]:
        """Return the engine's own arguments of every server, such as its keys `api_key` and `admin_api_key`."""
        return {}

    def server(self, settings: Settings, spec: ServerSpec, *, log: Path, waiting: bool) -> ServerProcess:
        """Create one server without starting it. Called on the machine where it will run.

        With `waiting`, it answers no request before the first push. Otherwise it starts with the weights of
        `spec.model`.
        """
        raise SettingsError(
            f"engine.num_engines: {settings.engine.backend} has no servers, and a process runs only one engine. Use 1."
        )

    def meeting_flags(self, address: str) -> Sequence[str]:
        """Return the arguments with the meeting address for the processes of a server on several machines."""
        raise SettingsError("cluster.rollout_num_gpus_per_engine: these engines run on one machine. Lower it.")

    def workers(self, settings: Settings, urls: Sequence[str]) -> HttpWorkers:
        """Create the client that pushes weights to servers at these addresses."""
        from slimectl.engines.sglang.weight_client import SglangWorkers

        return SglangWorkers(urls, timeout_s=settings.sync.timeout_s, keys=keys(settings))

    def api(self) -> ServerApi:
        """Return the dialect of the servers' HTTP API. `slimectl serve` uses SGLang's."""
        from slimectl.engines.sglang.api import SglangApi

        return SglangApi()

    def reporting_api(self, *, layers: int, choices: int) -> ServerApi:
        """Return the dialect of servers that report every token's experts, `choices` in each of `layers` layers.

        Raises SettingsError if the servers cannot report them.
        """
        raise SettingsError(
            "train.use_rollout_routing_replay: servers of engine.backend do not report experts. Use embedded, sglang "
            "or vllm."
        )


class InProcessBackend(EngineBackend):
    """slimectl's own engine, in this process or as `slimectl serve`."""

    in_process = True
    reads_torch_dist = True
    adapter_transports = ("tensor", "distributed")

    def model_of(self, config: Mapping[str, Any]) -> str:
        """Return what computes the model of a config.json: "embedded" or "transformers"."""
        raise NotImplementedError

    def check(self, settings: Settings) -> None:
        if settings.cluster.executor == "local":
            device(settings.engine.device)
        path = settings.model.path
        if path is not None and Path(path).is_dir():
            from slimectl.checkpoints.hf_weights import check_plain

            check_plain(policy_folder(Path(path)))

    def engine(self, settings: Settings, folder: Path, tokenizer: Any, *, load: bool) -> Any:
        import torch
        from transformers import AutoConfig

        from slimectl.checkpoints.torch_dist.mapping import ModelCheckpoint
        from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions

        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            options = EngineOptions(
                dtype=getattr(torch, settings.engine.dtype),
                device=device(settings.engine.device),
                max_running=settings.engine.max_running_requests,
                max_context=settings.rollout.max_context_len,
                end_token_ids=end_tokens(folder, tokenizer),
                prefix_cache_gib=settings.engine.prefix_cache_gib,
                reports_experts=settings.train.use_rollout_routing_replay,
                compile_kernels=settings.engine.compile_kernels,
            )
            model = _transformers_model(folder) if self.model_of(raw_config(folder)) == "transformers" else None
            engine = EmbeddedEngine(
                config, tokenizer, options, images=lambda source: processor_of(str(folder)).patches(source), model=model
            )
        except SlimectlError:
            raise
        except Exception as error:
            raise CheckpointError(f"{folder}: config.json cannot be used: {first_line(error, 300)}") from error
        if settings.train.use_rollout_routing_replay and not engine.has_experts:
            raise SettingsError(NO_EXPERTS if model is None else NO_EXPERTS_FROM_TRANSFORMERS)
        if load:
            engine.load_weights(ModelCheckpoint().read(folder), version=version_of(folder))
        return engine

    def server(self, settings: Settings, spec: ServerSpec, *, log: Path, waiting: bool) -> ServerProcess:
        from slimectl.engines.server.launch import serve_server

        names = ("backend", "max_running_requests", "prefix_cache_gib", "compile_kernels", "middleware_paths")
        more = {f"engine.{name}": json.dumps(getattr(settings.engine, name)) for name in names}
        options = server_options(settings, spec, log=log, waiting=waiting)
        return serve_server(spec, options, settings=more, pause_timeout_s=settings.sync.timeout_s)

    def reporting_api(self, *, layers: int, choices: int) -> ServerApi:
        from slimectl.engines.sglang.api import SglangApi

        return SglangApi(routed_experts=(layers, choices))


class EmbeddedBackend(InProcessBackend):
    """The engine with its own forward pass of some families."""

    def model_of(self, config: Mapping[str, Any]) -> str:
        return "embedded"


class TransformersBackend(InProcessBackend):
    """The engine with transformers' forward pass of any causal language model."""

    def model_of(self, config: Mapping[str, Any]) -> str:
        return "transformers"


class AutoBackend(InProcessBackend):
    """The engine with its own forward pass for the families that have one, and with transformers' for all others."""

    def model_of(self, config: Mapping[str, Any]) -> str:
        from slimectl.engines.embedded.model import runs_embedded

        return "embedded" if runs_embedded(config) else "transformers"


def _transformers_model(folder: Path) -> Callable[[Any, EngineOptions], SequenceModel]:
    """Return what builds transformers' model for the weights of a folder, which may have none yet."""
    import torch

    from slimectl.checkpoints.torch_dist.mapping import ModelCheckpoint
    from slimectl.engines.transformers.model import TransformersModel

    stored: Collection[str] = ()
    with suppress(CheckpointError):
        stored = ModelCheckpoint().open(folder).forms()

    def build(config: Any, options: EngineOptions) -> SequenceModel:
        return TransformersModel(config, dtype=options.dtype, device=torch.device(options.device), stored=stored)

    return build


def engine_path(settings: Settings, config: Mapping[str, Any]) -> str:
    """Return what generates text with the model of a config.json: engine.backend, with "auto" resolved."""
    selected = engine_backend(settings)
    return selected.model_of(config) if isinstance(selected, InProcessBackend) else settings.engine.backend


def engine_backend(settings: Settings) -> EngineBackend:
    """Return the backend that engine.backend selects."""
    return backend(ENGINES, settings.engine.backend, EngineBackend)


def engine(settings: Settings, folder: Path, tokenizer: Any, *, load: bool = True) -> Any:
    """Build this process's engine for a model directory. Without `load`, the first push sets its weights."""
    return engine_backend(settings).engine(settings, folder, tokenizer, load=load)


def engine_reads(settings: Settings, folder: Path) -> bool:
    """Return whether the engines of the settings can read this model directory. Servers of engine.url cannot."""
    return bool(settings.engine.url) or engine_backend(settings).reads_torch_dist or not is_torch_dist(folder)


def server_options(settings: Settings, spec: ServerSpec, *, log: Path, waiting: bool) -> ServerOptions:
    """Return the options of a server that logs to a file and, if `waiting`, gets its weights by a push."""
    from slimectl.engines.http.request import NO_WEIGHTS
    from slimectl.engines.supervisor.server_process import ServerOptions

    return ServerOptions(
        log.absolute(),
        dtype=settings.engine.dtype,
        device=device(settings.engine.device),
        max_context=settings.rollout.max_context_len,
        weight_version=NO_WEIGHTS if waiting else version_of(spec.model),
        host=None if executor_backend(settings).spans_machines(settings) else "127.0.0.1",
        start_timeout_s=settings.engine.start_timeout_s,
        keys=keys(settings),
    )


def keys(settings: Settings) -> ServerKeys:
    """Return the keys of the servers from [engine], the engine's own arguments, or the key file of a local server."""
    from slimectl.engines.api_keys import ServerKeys

    options = settings.engine
    args = reveal(engine_backend(settings).server_args(settings), setting=f"{options.backend}.args")
    return ServerKeys(
        api_key=reveal(options.api_key, setting="engine.api_key") or args.get("api_key"),
        admin_api_key=reveal(options.admin_api_key, setting="engine.admin_api_key") or args.get("admin_api_key"),
        finds_local=bool(options.url),
    )
