"""Modules of slime under their names, for functions that import them; an installed slime goes first."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from types import ModuleType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from slimectl.errors import BackendError
from slimectl.stages.filters import nonzero_std
from slimectl.transport.http import PASSING, backoff_s
from slimectl.types import Sample
from slimectl.user_code import load_callable


@dataclasses.dataclass
class DynamicFilterOutput:
    """Whether a group is kept, and why not."""

    keep: Any
    reason: str | None = None
    keep_when_insufficient: bool = False


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ; the filter that most of slime's scripts name."""
    keep, reason = nonzero_std(args, samples)
    return DynamicFilterOutput(keep, reason or None)


@dataclasses.dataclass
class RolloutFnTrainOutput:
    """Groups of a round, and metrics."""

    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclasses.dataclass
class RolloutFnEvalOutput:
    """Samples and rewards by dataset, and metrics."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class DataSource:
    """Base class of data sources, without methods of its own."""


class GenerateState:
    """Parts that generate functions share: the tokenizer of the model, the sampling parameters, a semaphore.

    There is one for each event loop, as the semaphore belongs to it.
    """

    processor: Any = None
    """None: prompts are text."""

    aborted = False
    """Always False: an interrupted attempt is told so by its requests."""

    _of_loops: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, GenerateState]] = WeakKeyDictionary()

    def __new__(cls, args: Any) -> GenerateState:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a function that is not async
            return super().__new__(cls)
        if loop not in cls._of_loops:
            cls._of_loops[loop] = super().__new__(cls)
        return cls._of_loops[loop]

    def __init__(self, args: Any) -> None:
        if hasattr(self, "args"):
            return
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
        self.sampling_params = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": list(args.rollout_stop),
            "stop_token_ids": list(args.rollout_stop_token_ids),
            **args.rollout.penalties,
        }


@cache
def load_tokenizer(name_or_path: str, **options: Any) -> Any:
    """Load the tokenizer of a model directory; no code of it is run, whatever the options say."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(name_or_path, local_files_only=True, trust_remote_code=False)


async def post(url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """Send a POST request and return the JSON of the answer. Raises BackendError after `max_retries` failures."""
    return await _ask("POST", url, payload, max_retries, headers)


async def get(url: str, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """Send a GET request like `post`."""
    return await _ask("GET", url, None, max_retries, headers)


async def _ask(method: str, url: str, body: Any, max_retries: int, headers: Mapping[str, str] | None) -> Any:
    from slimectl.transport.http import request

    for attempt in range(1, max_retries + 1):
        try:
            reply = await request(method, url, timeout_s=14400.0, body=body, headers=headers)
            if reply.status < 400:
                return reply.body
            error = BackendError(f"{url}: {reply.status} {reply.words}")
            if reply.status not in PASSING:
                break
        except BackendError as failure:
            error = failure
        await asyncio.sleep(backoff_s(attempt, first_s=0.5, longest_s=5.0))
    raise error


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, also where an event loop is running already."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def load_function(path: str) -> Callable[..., Any]:
    """Return the function at a path."""
    return load_callable(path, setting="load_function")


MODULES: dict[str, dict[str, Any]] = {
    "slime": {},
    "slime.rollout": {},
    "slime.rollout.base_types": {
        "RolloutFnEvalOutput": RolloutFnEvalOutput,
        "RolloutFnTrainOutput": RolloutFnTrainOutput,
    },
    "slime.rollout.data_source": {"DataSource": DataSource},
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {"check_reward_nonzero_std": check_reward_nonzero_std},
    "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
    "slime.utils": {},
    "slime.utils.async_utils": {"run": run},
    "slime.utils.http_utils": {"get": get, "post": post},
    "slime.utils.misc": {"load_function": load_function},
    "slime.utils.processing_utils": {"load_tokenizer": load_tokenizer},
    "slime.utils.types": {"RolloutBatch": dict, "Sample": Sample},
}
"""Modules of slime that its functions import, and their names."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `MODULES` where no installed package has them: it stands last, so that a real slime goes first."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES:
            if name.startswith("slime.") and getattr(sys.modules.get("slime"), "__loader__", None) is self:
                modules = ", ".join(module for module, names in MODULES.items() if names)
                raise ModuleNotFoundError(
                    f"{name} is a part of slime itself; without it there are {modules}", name=name
                )
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=any(f"{name}." in other for other in MODULES))

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(MODULES[module.__name__])


def offer_modules() -> None:
    """Make `from slime.utils.types import Sample` and the like work in the functions of users."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
