"""The engines' end of a weight push: pause, take weights, go on, over SGLang's HTTP API.

The same calls drive SGLang 0.5.18 to 0.5.21 and `slimectl serve`. What SGLang asks for beyond its manual:
- Updates never ask for a flush of the prefix cache: with answers in flight it fails, and takes the scheduler along.
- From 0.5.21 tensors and broadcasts want to be bracketed by begin_weight_update and end_weight_update, which older ones
  do not have.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
from torch import Tensor, dtype

from slimectl.engines.keys import Keys
from slimectl.engines.sglang.asking import NO_KEYS, Answer, Json, ask, gathered
from slimectl.engines.sglang.payloads import SharedBlock, dtype_name, flattened, pickled

Body = Json | Callable[[str], Json]
"""What is sent to all, or to a URL."""

IDLE_TIMEOUT_S = 10.0
"""How long a paused engine may take to let go of its last answers before its prefix cache is flushed."""
SETTLE_S = 0.2
"""How long an engine that goes on in place may take to notice that it is idle."""
NO_SESSION = "no weight-update session"
OPEN_ALREADY = "already open"


class HttpWorkers:
    """ports.WeightWorkers over HTTP; `set_urls` names others, from any thread.

    An answer may take `timeout_s`. Picklable; must not be used inside a running event loop.
    """

    def __init__(self, urls: Sequence[str], *, timeout_s: float = 600.0, keys: Keys = NO_KEYS) -> None:
        self.timeout_s = timeout_s
        self._keys = keys
        self.urls: tuple[str, ...] = ()
        self._facts: dict[str, dict[str, Any]] = {}
        self._mode = "abort"
        self._opened = False
        self._block: SharedBlock | None = None
        self.set_urls(urls)

    def __getstate__(self) -> dict[str, Any]:
        """A copy shares no memory with this one."""
        return self.__dict__ | {"_block": None}

    def set_urls(self, urls: Sequence[str]) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)

    # --- who they are ----------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[int]:
        return [int(self._known(url).get("tp_size") or 1) for url in self.urls]

    @property
    def checksums_by_hf_name(self) -> bool:
        """Whether `checksums` can be compared with the trainer's own; SGLang names and hashes its fused tensors."""
        return all(self._serves(url) for url in self.urls)

    def _known(self, url: str) -> dict[str, Any]:
        """What a worker says of itself; asked once."""
        if url not in self._facts:
            unknown = [each for each in self.urls if each not in self._facts]
            for answer in self._all("/server_info", {}, urls=unknown, method="GET"):
                self._facts[answer.url] = answer.body if isinstance(answer.body, dict) else {}
        return self._facts[url]

    def _serves(self, url: str) -> bool:
        """Whether a worker is `slimectl serve`."""
        return self._known(url).get("engine") == "slimectl"

    # --- around an update ------------------------------------------------------------------------------------------

    def begin(self, *, mode: str) -> None:
        self._mode, self._opened = mode, False
        try:
            self._all("/pause_generation", {"mode": mode})
        except BaseException:
            self._end(within_s=IDLE_TIMEOUT_S)
            raise

    def end(self, *, within_s: float | None = None) -> None:
        """With `in_place` and answers in flight SGLang cannot forget its prefixes; all else can."""
        for failure in self._end(within_s=within_s):
            raise failure

    def _end(self, *, within_s: float | None) -> list[BaseException]:
        async def ended(session: aiohttp.ClientSession, url: str) -> None:
            answers = [await ask(session, url, "/end_weight_update", {}, keys=self._keys)]
            # Retracted answers wait for ever; aborted ones are about to go.
            wait = f"?timeout={IDLE_TIMEOUT_S}" if self._mode == "abort" else ""
            answers.append(await ask(session, url, f"/flush_cache{wait}", {}, keys=self._keys))
            # Whatever came before: an engine must not stay paused.
            goes_on = await ask(session, url, "/continue_generation", {}, keys=self._keys)
            if answers[0].status in (404, 405) or NO_SESSION in answers[0].words or not answers[0].refused:
                del answers[0]
            if self._mode == "in_place" and answers.pop().refused:
                # SGLang counts an answer that has just ended as running until it goes on: its prefix would stay.
                await ask(session, url, f"/flush_cache?timeout={SETTLE_S}", {}, keys=self._keys)
            for answer in [*answers, goes_on]:
                if answer.refused:
                    raise answer.error()

        found = gathered(ended, self.urls, limit_s=min(within_s or self.timeout_s, self.timeout_s))
        self._opened, self._mode = False, "abort"
        return [each for each in found if isinstance(each, BaseException)]

    def _open(self) -> None:
        """Say once, before the first tensor, that tensors will come; where that is known."""
        if not self._opened:
            for answer in self._ask_all("/begin_weight_update", {}):
                if answer.refused and answer.status not in (404, 405) and OPEN_ALREADY not in answer.words:
                    raise answer.error()
            self._opened = True

    def sleep(self) -> None:
        """Give back the memory of cache and weights; what is in flight ends first."""
        self._all("/pause_generation", {"mode": "abort"})
        self._all("/release_memory_occupation", {})

    def wake(self) -> None:
        """Take it again; the weights come with a push, which also goes on."""
        self._all("/resume_memory_occupation", {})

    # --- updates ---------------------------------------------------------------------------------------------------

    def load_disk(self, folder: Path, *, version: str) -> None:
        self._all("/update_weights_from_disk", {"model_path": str(Path(folder).resolve()), **_versioned(version)})

    def load_tensors(self, tensors: Sequence[tuple[str, Tensor]], *, version: str) -> None:
        """The workers of one kind after those of the other; one copy of the tensors in shared memory serves all."""
        self._open()
        path = "/update_weights_from_tensor"
        serving = [url for url in self.urls if self._serves(url)]
        others = [url for url in self.urls if url not in serving]
        if serving:
            size = sum(tensor.nbytes for _, tensor in tensors)
            if self._block is None or self._block.size < size:
                self._block = SharedBlock(size)
            held = self._block.hold(tensors)
            self._all(path, {"load_format": "shared_memory", **held, **_versioned(version)}, urls=serving)
        if others:
            flat, places = flattened(tensors)
            ranks = [int(self._known(url).get("tp_size") or 1) for url in others]
            # A handle of CUDA IPC can be opened once: every rank reads a pickle of its own.
            apart = sum(ranks) if flat.is_cuda else 1
            payloads = iter([base64.b64encode(pickled(flat, places)) for _ in range(apart)] * (sum(ranks) // apart))
            rest = json.dumps({"load_format": "flattened_bucket", **_versioned(version)})[1:].encode()
            # Put together by hand: an encoder would look at every byte.
            bodies = {
                url: b'{"serialized_named_tensors":["' + b'","'.join(islice(payloads, count)) + b'"],' + rest
                for url, count in zip(others, ranks, strict=True)
            }
            self._all(path, bodies.__getitem__, urls=others)

    def join(self, *, host: str, port: int, world: int, name: str, backend: str) -> None:
        offsets: dict[str, int] = {}
        taken = 1
        for url, ranks in zip(self.urls, self.ranks, strict=True):
            offsets[url], taken = taken, taken + ranks
        group = {
            "master_address": host, "master_port": port, "world_size": world, "group_name": name, "backend": backend
        }  # fmt: skip
        self._all("/init_weights_update_group", lambda url: {**group, "rank_offset": offsets[url]})

    def load_broadcast(self, forms: Sequence[tuple[str, dtype, tuple[int, ...]]], *, name: str, version: str) -> None:
        """All tensors come as one, in this order; wide numbers must be first, as `aligned` puts them."""
        self._open()
        body = {
            "names": [form[0] for form in forms],
            "dtypes": [dtype_name(form[1]) for form in forms],
            "shapes": [list(form[2]) for form in forms],
            "group_name": name,
            "load_format": "flattened_bucket",
        }
        self._all("/update_weights_from_distributed", {**body, **_versioned(version)})

    def leave(self, *, name: str) -> None:
        """What does not know the group any more has left it already; nobody is waited for long."""
        path = "/destroy_weights_update_group"
        for answer in self._ask_all(path, {"group_name": name}, limit_s=IDLE_TIMEOUT_S):
            if answer.refused and "does not exist" not in answer.words:
                raise answer.error()

    def checksums(self) -> list[dict[str, str]]:
        """Of SGLang: its own hashes of its own tensors, by rank; comparable with each other only."""
        found = []
        for answer in self._all("/weights_checker", {"action": "checksum"}):
            ranks = answer.body["ranks"]
            own = not self._serves(answer.url)
            found.append(
                {
                    f"rank {i}: {name}" if own else name: checksum
                    for i, rank in enumerate(ranks)
                    for name, checksum in rank["checksums"].items()
                }
            )
        return found

    def scramble(self) -> None:
        self._all("/weights_checker", {"action": "reset_tensors"})

    # --- how they are asked ----------------------------------------------------------------------------------------

    def _all(self, path: str, body: Body, *, urls: Sequence[str] | None = None, method: str = "POST") -> list[Answer]:
        """Every worker's answer, none of them a refusal."""
        answers = self._ask_all(path, body, urls=urls, method=method)
        for answer in answers:
            if answer.refused:
                raise answer.error()
        return answers

    def _ask_all(
        self,
        path: str,
        body: Body,
        *,
        urls: Sequence[str] | None = None,
        method: str = "POST",
        limit_s: float | None = None,
    ) -> list[Answer]:
        async def asked(session: aiohttp.ClientSession, url: str) -> Answer:
            sent = body(url) if callable(body) else body
            return await ask(session, url, path, sent, method=method, keys=self._keys)

        limit_s = min(limit_s or self.timeout_s, self.timeout_s)
        found = gathered(asked, self.urls if urls is None else urls, limit_s=limit_s)
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        return found


def _versioned(version: str) -> dict[str, Any]:
    return {"weight_version": version, "flush_cache": False}
