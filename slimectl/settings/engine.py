"""Settings of the inference engines: one engine in this process, or a pool of servers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from slimectl.plugins.registry import ENGINES
from slimectl.settings.base import PositiveInt, Section, Texts, registered_in
from slimectl.settings.secret import Key

Seconds = Annotated[float, Field(gt=0)]


class EngineSettings(Section):
    """The inference engines that generate answers."""

    section_name: ClassVar[str] = "engine"

    backend: Annotated[str, *registered_in(ENGINES)] = "auto"
    """Inference engine: auto, embedded, transformers, sglang or vllm. embedded has its own fast forward pass of some
    model families. transformers runs any causal language model of transformers, more slowly. auto is embedded for its
    families and transformers for all others. These three run on a CPU or one GPU, a single one in this process."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of weights and KV cache. float32 agrees with the trainer to the last digits. bfloat16 is faster."""

    load: str | None = None
    """Hugging Face directory of the policy's model in fp8 for SGLang or vLLM servers (`slimectl convert --quantize
    fp8`). Pushes are quantized as its config.json defines."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the embedded engine. auto uses the GPU if there is one."""

    max_running_requests: PositiveInt = 64
    """Maximum sequences that an embedded engine decodes at the same time. Others wait and join as sequences finish."""

    prefix_cache_gib: Annotated[float, Field(ge=0)] = 1.0
    """Memory in GiB for the prefix cache of an embedded engine. It keeps keys and values of finished sequences and
    reuses them for prompts with the same start: later turns, siblings, a common system prompt. 0 turns it off."""

    compile_kernels: bool = True
    """Use C kernels in the embedded engine on a CPU (Linux, x86-64), compiled once if cc, gcc or clang is installed.
    Decoding is 1.2 to 1.5 times as fast. The last digits differ from torch's operators."""

    url: Texts = []
    """Running servers to use instead of starting any: vLLM servers for backend vllm, otherwise SGLang or `slimectl
    serve`."""

    api_key: Key | None = None
    """Key for every request: `slimectl serve` requires it, and requests to engine.url carry it. Prefer env:NAME or
    file:PATH to the key itself. It is never written down."""

    admin_api_key: Key | None = None
    """Key for requests that change a server's state: weights, pauses, aborts, memory. Default: random."""

    num_engines: PositiveInt = 1
    """Engines to start. Several embedded engines run as processes of `slimectl serve`."""

    router: Literal["auto", "none", "cache_aware", "round_robin", "random", "power_of_two"] = "auto"
    """Routing policy of sglang-router in front of several engines. `none` distributes requests without it. `auto` is
    cache_aware for SGLang engines, and none for others and with train.use_rollout_routing_replay."""

    middleware_paths: Texts = []
    """Paths of your own aiohttp middlewares for `slimectl serve` and for several embedded engines: async functions
    (request, handler). The first is outermost (docs/serving.md)."""

    session_affinity: bool = True
    """Send the attempts of a group to the same engine, to use its prefix cache."""

    server_concurrency: PositiveInt = 512
    """Maximum requests in flight per server."""

    request_timeout_s: Seconds = 14400
    """Time limit of one response in seconds."""

    connect_timeout_s: Seconds = 120
    """Seconds to retry a server that does not answer."""

    start_timeout_s: Seconds = 600
    """Seconds a server may take to start."""

    use_fault_tolerance: bool = True
    """Restart servers that died or hang. Those of engine.url leave the run instead (docs/clusters.md)."""

    health_check_interval: Seconds = 30
    """Seconds between health checks."""

    health_check_timeout: Seconds = 30
    """Seconds without an answer after which a server counts as dead."""

    health_check_first_wait: Annotated[float, Field(ge=0)] = 0
    """Seconds before the first health check."""

    max_restarts: Annotated[int, Field(ge=0)] = 10
    """Maximum server restarts in a run. The next death ends the run."""

    @field_validator("router", mode="before")
    @classmethod
    def _read_none(cls, value: object) -> object:
        """Return "none" for None. The loader reads none as no value, but a router always has one."""
        return "none" if value is None else value


class SglangSettings(Section):
    """SGLang servers: the Python that runs them, and any argument of SGLang."""

    section_name: ClassVar[str] = "sglang"

    python: str | None = None
    """Python interpreter with SGLang. Default: this one."""

    args: dict[str, Any] = {}
    """Any field of SGLang's ServerArgs, e.g. {mem_fraction_static = 0.8}. Checked against the installed version."""

    prefill_num_servers: Annotated[int, Field(ge=0)] = 0
    """Engines that only prefill (prefill/decode disaggregation). The others only decode."""

    server_groups: list[dict[str, Any]] = []
    """Groups of engines, instead of engine.num_engines: [{name, model, num_engines, num_gpus_per_engine, role, args}].
    A group with another model (a judge, a teacher) gets no weight updates."""


class VllmSettings(Section):
    """vLLM servers: the Python that runs them, and any argument of vLLM."""

    section_name: ClassVar[str] = "vllm"

    python: str | None = None
    """Python interpreter with vLLM. Default: this one."""

    args: dict[str, Any] = {}
    """Any flag of `vllm serve`, with underscores, e.g. {max_num_seqs = 64}. Checked against the installed version."""


class ModelSettings(Section):
    """The model that is trained and sampled."""

    path: str | None = None
    """Hugging Face directory, .gguf file, or package:NAME for a GGUF in an installed Python package."""

    verify: bool = False
    """Hash every file in the model's manifest.json. By default files above 32 MiB are hashed only if all have up to 1
    GiB together."""

    card: str | None = None
    """Model card for a new model with random weights, if no path is given (see `slimectl models`)."""
