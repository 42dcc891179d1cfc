"""Engines' side of a weight push: pause, load weights, continue, over SGLang's HTTP API.

The same calls drive SGLang 0.5.18 to 0.5.21 and `slimectl serve`. Requirements of SGLang beyond its manual:
- Updates never request a flush of the prefix cache: with answers in flight it fails, and ends the scheduler.
- From 0.5.21 tensors and broadcasts must be enclosed by begin_weight_update and end_weight_update, which older
  versions do not have.
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

from slimectl.engines.api_keys import Keys
from slimectl.engines.http.payloads import SharedMemoryBlock, dtype_name, flatten, pickled
from slimectl.engines.http.transport import NO_KEYS, Answer, Json, ask, ask_all

Body = Json | Callable[[str], Json]
"""Body for all workers, or a function of the URL."""

IDLE_TIMEOUT_S = 10.0
"""Seconds that a paused engine may take to end its last answers before its prefix cache is flushed."""
SETTLE_S = 0.2
"""Seconds that an engine that continues in place may take to notice that it is idle."""
NO_SESSION = "no weight-update session"
OPEN_ALREADY = "already open"


class HttpWorkers:
    """protocols.WeightUpdateClient over HTTP; `set_urls` replaces the workers, from any thread.

    A response may take `timeout_s`. Picklable; must not be used inside a running event loop.
    """

    def __init__(self, urls: Sequence[str], *, timeout_s: float = 600.0, keys: Keys = NO_KEYS) -> None:
        self.timeout_s = timeout_s
        self._keys = keys
        self.urls: tuple[str, ...] = ()
        self._server_infos: dict[str, dict[str, Any]] = {}
        self._mode = "abort"
        self._session_open = False
        self._block: SharedMemoryBlock | None = None
        self.set_urls(urls)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the shared-memory block: a copy allocates one itself."""
        return self.__dict__ | {"_block": None}

    def set_urls(self, urls: Sequence[str]) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)

    # --- server info -----------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[int]:
        return [int(self._server_info(url).get("tp_size") or 1) for url in self.urls]

    @property
    def checksums_by_hf_name(self) -> bool:
        """Whether `checksums` can be compared with the trainer's own; SGLang names and hashes its fused tensors."""
        return all(self._is_slimectl_serve(url) for url in self.urls)

    def _server_info(self, url: str) -> dict[str, Any]:
        """Return the /server_info of a worker; requested once."""
        if url not in self._server_infos:
            unknown = [other_url for other_url in self.urls if other_url not in self._server_infos]
            for answer in self._request_all("/server_info", {}, urls=unknown, method="GET"):
                self._server_infos[answer.url] = answer.body if isinstance(answer.body, dict) else {}
        return self._server_infos[url]

    def _is_slimectl_serve(self, url: str) -> bool:
        """Whether a worker is `slimectl serve`."""
        return self._server_info(url).get("engine") == "slimectl"

    # --- around an update ------------------------------------------------------------------------------------------

    def begin(self, *, mode: str) -> None:
        self._mode, self._session_open = mode, False
        try:
            self._request_all("/pause_generation", {"mode": mode})
        except BaseException:
            self._end(within_s=IDLE_TIMEOUT_S)
            raise

    def end(self, *, within_s: float | None = None) -> None:
        """End the update and continue. Flushes the prefix cache, except of SGLang `in_place` with answers in flight."""
        for failure in self._end(within_s=within_s):
            raise failure

    def _end(self, *, within_s: float | None) -> list[BaseException]:
        async def end_one(session: aiohttp.ClientSession, url: str) -> None:
            answers = [await ask(session, url, "/end_weight_update", {}, keys=self._keys)]
            # Retracted answers wait for ever; aborted ones are about to end.
            wait = f"?timeout={IDLE_TIMEOUT_S}" if self._mode == "abort" else ""
            answers.append(await ask(session, url, f"/flush_cache{wait}", {}, keys=self._keys))
            # Even after a failure: an engine must not stay paused.
            continued = await ask(session, url, "/continue_generation", {}, keys=self._keys)
            if answers[0].status in (404, 405) or NO_SESSION in answers[0].words or not answers[0].refused:
                del answers[0]
            if self._mode == "in_place" and answers.pop().refused:
                # SGLang counts an answer that has just ended as running until it continues: its prefix would stay.
                await ask(session, url, f"/flush_cache?timeout={SETTLE_S}", {}, keys=self._keys)
            for answer in [*answers, continued]:
                if answer.refused:
                    raise answer.error()

        results = ask_all(end_one, self.urls, limit_s=min(within_s or self.timeout_s, self.timeout_s))
        self._session_open, self._mode = False, "abort"
        return [result for result in results if isinstance(result, BaseException)]

    def _begin_update(self) -> None:
        """Begin the update session before the first tensor, on engines that support sessions."""
        if not self._session_open:
            for answer in self._ask_all("/begin_weight_update", {}):
                if answer.refused and answer.status not in (404, 405) and OPEN_ALREADY not in answer.words:
                    raise answer.error()
            self._session_open = True

    def sleep(self) -> None:
        """Release the memory of cache and weights, after ending requests in flight."""
        self._request_all("/pause_generation", {"mode": "abort"})
        self._request_all("/release_memory_occupation", {})

    def wake(self) -> None:
        """Allocate the memory again; a push brings the weights and continues generation."""
        self._request_all("/resume_memory_occupation", {})

    # --- updates ---------------------------------------------------------------------------------------------------

    def load_disk(self, folder: Path, *, version: str) -> None:
        self._request_all(
            "/update_weights_from_disk", {"model_path": str(Path(folder).resolve()), **_version_fields(version)}
        )

    def load_tensors(self, tensors: Sequence[tuple[str, Tensor]], *, version: str) -> None:
        """Load tensors, first into `slimectl serve`, then into SGLang; one copy in shared memory serves all workers."""
        self._begin_update()
        path = "/update_weights_from_tensor"
        serve_urls = [url for url in self.urls if self._is_slimectl_serve(url)]
        sglang_urls = [url for url in self.urls if url not in serve_urls]
        if serve_urls:
            size = sum(tensor.nbytes for _, tensor in tensors)
            if self._block is None or self._block.size < size:
                self._block = SharedMemoryBlock(size)
            layout = self._block.hold(tensors)
            self._request_all(
                path, {"load_format": "shared_memory", **layout, **_version_fields(version)}, urls=serve_urls
            )
        if sglang_urls:
            flat, places = flatten(tensors)
            ranks = [int(self._server_info(url).get("tp_size") or 1) for url in sglang_urls]
            # A handle of CUDA IPC can be opened once: every rank reads a separate pickle.
            copies = sum(ranks) if flat.is_cuda else 1
            payloads = iter([base64.b64encode(pickled(flat, places)) for _ in range(copies)] * (sum(ranks) // copies))
            tail = json.dumps({"load_format": "flattened_bucket", **_version_fields(version)})[1:].encode()
            # Concatenated by hand: an encoder would scan every byte.
            bodies = {
                url: b'{"serialized_named_tensors":["' + b'","'.join(islice(payloads, count)) + b'"],' + tail
                for url, count in zip(sglang_urls, ranks, strict=True)
            }
            self._request_all(path, bodies.__getitem__, urls=sglang_urls)

    def join(self, *, host: str, port: int, world: int, name: str, backend: str) -> None:
        offsets: dict[str, int] = {}
        next_rank = 1
        for url, ranks in zip(self.urls, self.ranks, strict=True):
            offsets[url], next_rank = next_rank, next_rank + ranks
        group = {
            "master_address": host, "master_port": port, "world_size": world, "group_name": name, "backend": backend
        }  # fmt: skip
        self._request_all("/init_weights_update_group", lambda url: {**group, "rank_offset": offsets[url]})

    def load_broadcast(self, forms: Sequence[tuple[str, dtype, tuple[int, ...]]], *, name: str, version: str) -> None:
        """Receive all tensors as one broadcast, in this order; wide numbers must be first, as `aligned` sorts them."""
        self._begin_update()
        body = {
            "names": [form[0] for form in forms],
            "dtypes": [dtype_name(form[1]) for form in forms],
            "shapes": [list(form[2]) for form in forms],
            "group_name": name,
            "load_format": "flattened_bucket",
        }
        self._request_all("/update_weights_from_distributed", {**body, **_version_fields(version)})

    def leave(self, *, name: str) -> None:
        """Leave the group; a worker that does not know it has left already. Waits at most IDLE_TIMEOUT_S."""
        path = "/destroy_weights_update_group"
        for answer in self._ask_all(path, {"group_name": name}, limit_s=IDLE_TIMEOUT_S):
            if answer.refused and "does not exist" not in answer.words:
                raise answer.error()

    def checksums(self) -> list[dict[str, str]]:
        """Return the checksums of every worker's tensors.

        SGLang hashes its own tensors, by rank; these are comparable with each other only.
        """
        by_worker = []
        for answer in self._request_all("/weights_checker", {"action": "checksum"}):
            ranks = answer.body["ranks"]
            is_sglang = not self._is_slimectl_serve(answer.url)
            by_worker.append(
                {
                    f"rank {i}: {name}" if is_sglang else name: checksum
                    for i, rank in enumerate(ranks)
                    for name, checksum in rank["checksums"].items()
                }
            )
        return by_worker

    def randomize_weights(self) -> None:
        self._request_all("/weights_checker", {"action": "reset_tensors"})

    # --- requests --------------------------------------------------------------------------------------------------

    def _request_all(
        self, path: str, body: Body, *, urls: Sequence[str] | None = None, method: str = "POST"
    ) -> list[Answer]:
        """Send a request to every worker; returns their answers. Raises BackendError if one refuses."""
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
        async def ask_one(session: aiohttp.ClientSession, url: str) -> Answer:
            sent = body(url) if callable(body) else body
            return await ask(session, url, path, sent, method=method, keys=self._keys)

        limit_s = min(limit_s or self.timeout_s, self.timeout_s)
        results = ask_all(ask_one, self.urls if urls is None else urls, limit_s=limit_s)
        for answer in results:
            if isinstance(answer, BaseException):
                raise answer
        return results


def _version_fields(version: str) -> dict[str, Any]:
    return {"weight_version": version, "flush_cache": False}
