"""Settings of the inference engines: one engine in this process, or a pool of servers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from slimectl.registry import ENGINES
from slimectl.settings.base import PositiveInt, Section, Texts, registered_in
from slimectl.settings.secret import Key

Seconds = Annotated[float, Field(gt=0)]


class EngineSettings(Section):
    """The inference engines that generate answers."""

    section_name: ClassVar[str] = "engine"

    backend: Annotated[str, *registered_in(ENGINES)] = "embedded"
    """Which engine; embedded runs on a CPU or one GPU, in this process where there is one of it."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of weights and KV cache; float32 agrees with the trainer to the last digits, bfloat16 is faster."""

    load: str | None = None
    """Hugging Face directory that SGLang or vLLM servers hold, where it is the policy's model in fp8 (`slimectl convert
    --quantize fp8`): pushes are quantized as its config.json says."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; auto takes the GPU if there is one."""

    max_running_requests: PositiveInt = 64
    """Sequences that an embedded engine decodes at the same time; more wait and join as others finish."""

    prefix_cache_gib: Annotated[float, Field(ge=0)] = 1.0
    """Memory, in GiB, in which an embedded engine keeps keys and values of prompts and answers that have ended, for
    prompts that begin with them: the next turn of a conversation, siblings, a common system prompt. 0 keeps none."""

    compile_kernels: bool = True
    """Compile the embedded engine's C kernels once on a CPU (Linux, x86-64), if cc, gcc or clang is there, and take
    them: a decoding step is 1.2 to 1.5 times as fast, and rounds in other last digits than torch's operators."""

    url: Texts = []
    """Running servers to use instead of starting any: vLLM's for backend vllm, else SGLang's or `slimectl serve`."""

    api_key: Key | None = None
    """Key that a server asks for before it answers anything: `slimectl serve` asks everybody, and requests to
    engine.url carry it. Better env:NAME or file:PATH than the key itself; it is never written down."""

    admin_api_key: Key | None = None
    """Key for all that changes a server's state: weights, pauses, aborts, memory. Servers that are started here get a
    random one, and `slimectl serve` draws one, where none is given."""

    num_engines: PositiveInt = 1
    """Engines to start; embedded ones live in processes of their own (`slimectl serve`) where there are several."""

    router: Literal["auto", "none", "cache_aware", "round_robin", "random", "power_of_two"] = "auto"
    """sglang-router's policy in front of several engines; `none` spreads requests here, `auto` is cache_aware for
    SGLang engines and none for others."""

    middleware_paths: Texts = []
    """Your own aiohttp middlewares around the routes of `slimectl serve` and of several embedded engines, by path:
    async functions of (request, handler). The first is outermost (docs/serving.md)."""

    session_affinity: bool = True
    """Send the attempts of one group to the same engine, whose prefix cache then serves them."""

    server_concurrency: PositiveInt = 512
    """Requests in flight at each server."""

    request_timeout_s: Seconds = 14400
    """How long one answer may take."""

    connect_timeout_s: Seconds = 120
    """How long a server that does not answer is tried again before the work fails."""

    start_timeout_s: Seconds = 600
    """How long a server may take to start."""

    use_fault_tolerance: bool = True
    """Restart servers that died or hang."""

    health_check_interval: Seconds = 30
    """Seconds between two looks at a server."""

    health_check_timeout: Seconds = 30
    """Seconds after which a server that does not answer is taken for dead."""

    health_check_first_wait: Annotated[float, Field(ge=0)] = 0
    """Seconds before the first look."""

    max_restarts: Annotated[int, Field(ge=0)] = 10
    """Restarts of servers in a run; one more death ends it."""

    @field_validator("router", mode="before")
    @classmethod
    def _read_none(cls, value: object) -> object:
        """Return "none" for None: the loader reads the word as no value, which a router cannot have."""
        return "none" if value is None else value


class SglangSettings(Section):
    """SGLang servers: which Python runs them, and whatever else SGLang takes."""

    section_name: ClassVar[str] = "sglang"

    python: str | None = None
    """Python that SGLang is installed in; this one where not given."""

    args: dict[str, Any] = {}
    """Any field of SGLang's ServerArgs, e.g. {mem_fraction_static = 0.8}; checked against the installed one."""

    prefill_num_servers: Annotated[int, Field(ge=0)] = 0
    """Engines that only prefill (prefill/decode disaggregation); the others then only decode."""

    server_groups: list[dict[str, Any]] = []
    """Engines in groups, in place of engine.num_engines: [{name, model, num_engines, num_gpus_per_engine, role, args}];
    a group of another model (a judge, a teacher) is started and gets no weights."""


class VllmSettings(Section):
    """vLLM servers: which Python runs them, and whatever else vLLM takes."""

    section_name: ClassVar[str] = "vllm"

    python: str | None = None
    """Python that vLLM is installed in; this one where not given."""

    args: dict[str, Any] = {}
    """Any flag of `vllm serve`, by its name with underscores, e.g. {max_num_seqs = 64}; checked against the installed
    one."""


class ModelSettings(Section):
    """The model that is trained and sampled."""

    path: str | None = None
    """Hugging Face directory, .gguf file, or package:NAME for a GGUF inside an installed Python package."""

    verify: bool = False
    """Hash every file that the model's manifest.json names; else those above 32 MiB only where all have up to 1 GiB."""

    card: str | None = None
    """Model card to build a new model of random weights from, where no path is given (see `slimectl models`)."""
