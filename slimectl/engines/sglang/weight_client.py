"""Pushes weights to engines over SGLang's HTTP API.

The same calls work with SGLang 0.5.18 to 0.5.21 and `slimectl serve`. Undocumented requirements of SGLang:
- Updates must not request a flush of the prefix cache. With responses in flight it fails and ends the scheduler.
- From 0.5.21 on, tensors and broadcasts must be enclosed by begin_weight_update and end_weight_update. Older
  versions do not have these endpoints.
- SGLang's tensor payloads pickle its own classes, which the trainer's Python may not have. Plain namespaces are used
  instead: SGLang reads metadata fields only by name, and its unpickler accepts namespaces (checked in 0.5.18, 0.5.20
  and 0.5.21).
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import torch
from torch import Tensor, dtype

from slimectl.engines.api_keys import NO_KEYS, ServerKeys
from slimectl.engines.http.weight_client import (
    IDLE_TIMEOUT_S,
    HttpWorkers,
    NamedTensor,
    WorkerReply,
    aligned,
    ask_all,
    dtype_name,
)
from slimectl.engines.sglang.launch import ADAPTER_LOADER
from slimectl.errors import BackendError
from slimectl.protocols import INCOMPLETE

SETTLE_S = 0.2
"""Seconds to wait until an engine that continues in place notices that it is idle."""
PREFILLED_S = 60.0
"""Seconds to wait until a resumed prefill server has nothing left to prefill."""
LOADS_S = 5.0
"""Seconds that a worker gets to report its load."""
PD_ROLES = ("prefill", "decode")
NO_SESSION = "no weight-update session"
OPEN_ALREADY = "already open"


class SglangWorkers(HttpWorkers):
    """engines.http.weight_client.HttpWorkers for SGLang servers and `slimectl serve`."""

    def __init__(self, urls: Sequence[str], *, timeout_s: float = 600.0, keys: ServerKeys = NO_KEYS) -> None:
        super().__init__(urls, timeout_s=timeout_s, keys=keys)
        self._server_infos: dict[str, dict[str, Any]] = {}
        self._roles: dict[str, str] = {}

    @property
    def ranks(self) -> list[int]:
        """Number of ranks of each worker in a broadcast group. Raises BackendError if a worker cannot join one."""
        for url in self.urls:
            if int(self._server_info(url).get("pp_size") or 1) > 1:
                raise BackendError(
                    f"engine at {url}: SGLang gives all pipeline stages the same ranks in a broadcast. "
                    f'Set sync.transport = "disk" or "delta", or leave sglang.args.pp_size out.'
                )
        return [int(self._server_info(url).get("tp_size") or 1) for url in self.urls]

    @property
    def checksums_by_hf_name(self) -> bool:
        """Whether `checksums` can be compared with the trainer's own. SGLang hashes its fused tensors instead."""
        return all(self._is_slimectl_serve(url) for url in self.urls)

    @property
    def shares_memory(self) -> bool:
        """Whether all workers are `slimectl serve`. On a CPU, SGLang accepts tensors only as text."""
        return self.checksums_by_hf_name

    @property
    def adapter_transports(self) -> Sequence[str]:
        """Only "tensor" if a worker is SGLang. None if it lacks our loader or has pipeline stages."""
        if self.checksums_by_hf_name:
            return ("tensor", "distributed")
        for info in (self._server_info(url) for url in self.urls if not self._is_slimectl_serve(url)):
            if ADAPTER_LOADER not in (info.get("custom_weight_loader") or ()) or int(info.get("pp_size") or 1) > 1:
                return ()
        return ("tensor",)

    def _server_info(self, url: str) -> dict[str, Any]:
        """Return the /server_info of a worker, which is requested only once."""
        if url not in self._server_infos:
            unknown = [other_url for other_url in self.urls if other_url not in self._server_infos]
            for answer in self._request_all("/server_info", {}, urls=unknown, method="GET"):
                self._server_infos[answer.url] = answer.body if isinstance(answer.body, dict) else {}
        return self._server_infos[url]

    def _is_slimectl_serve(self, url: str) -> bool:
        """Whether a worker is `slimectl serve`."""
        return self._server_info(url).get("engine") == "slimectl"

    # --- around an update ------------------------------------------------------------------------------------------

    def _pause(self, mode: str) -> None:
        self._roles = {url: str(self._server_info(url).get("disaggregation_mode")) for url in self.urls}
        self._request_all("/pause_generation", {"mode": mode})

    async def _resume(self, session: aiohttp.ClientSession, url: str) -> None:
        answers = [await self._ask(session, url, "/end_weight_update", {})]
        # Do not wait for retracted responses, which do not end while paused. Aborted ones are about to end.
        wait = f"?timeout={IDLE_TIMEOUT_S}" if self._mode == "abort" else ""
        answers.append(await self._ask(session, url, f"/flush_cache{wait}", {}))
        # Even after a failure, because an engine must not stay paused.
        continued = await self._ask(session, url, "/continue_generation", {})
        if not answers[0].refused or answers[0].status in (404, 405) or NO_SESSION in answers[0].message:
            del answers[0]
        if self._mode == "in_place" and answers.pop().refused:
            # Until it continues, SGLang counts a response that has just ended as running, so that its prefix would
            # stay.
            await self._ask(session, url, f"/flush_cache?timeout={SETTLE_S}", {})
        role = self._roles.get(url)
        # Retracted responses are prefilled again once both kinds continue. A decode server keeps no prefixes.
        if self._mode == "retract" and role in PD_ROLES and answers.pop().refused and role == "prefill":
            answers.append(await self._ask(session, url, f"/flush_cache?timeout={PREFILLED_S}", {}))
        for answer in [*answers, continued]:
            if answer.refused:
                raise answer.error()

    def _open_session(self) -> None:
        """Open the update session on engines that support sessions."""
        body = {} if self._adapter is None else {"adapter": self._adapter}
        for answer in self._ask_all("/begin_weight_update", body):
            if answer.refused and answer.status not in (404, 405) and OPEN_ALREADY not in answer.message:
                raise answer.error()
            if answer.refused and self._adapter is not None:  # left by a trainer that died, and not for an adapter
                self._ask_all("/end_weight_update", {}, urls=[answer.url])
                self._request_all("/begin_weight_update", body, urls=[answer.url])

    def sleep(self) -> None:
        self._request_all("/pause_generation", {"mode": "abort"})
        self._request_all("/release_memory_occupation", {})

    def wake(self) -> None:
        self._request_all("/resume_memory_occupation", {})

    # --- updates ---------------------------------------------------------------------------------------------------

    def load_disk(self, folder: Path, *, version: str, delta: Path | None = None) -> None:
        body = {"model_path": str(Path(folder).resolve()), **_version_fields(version)}
        changes = {} if delta is None else {"delta": str(Path(delta).resolve())}
        self._request_all(
            "/update_weights_from_disk", lambda url: body | (changes if self._is_slimectl_serve(url) else {})
        )

    def load_tensors(self, tensors: Sequence[tuple[str, Tensor]], *, version: str) -> None:
        """Load tensors into `slimectl serve` workers through one copy in shared memory, then into SGLang workers."""
        first = not self._session_open
        self._begin_update()
        path = "/update_weights_from_tensor"
        serve_urls = [url for url in self.urls if self._is_slimectl_serve(url)]
        sglang_urls = [url for url in self.urls if url not in serve_urls]
        if serve_urls:
            layout = self._shared_block(tensors)
            self._request_all(
                path, {"load_format": "shared_memory", **layout, **_version_fields(version)}, urls=serve_urls
            )
        if sglang_urls and self._adapter is not None:
            self._load_adapter(sglang_urls, tensors, version, first=first)
        elif sglang_urls:
            flat, places = flatten(tensors)
            ranks = [int(self._server_info(url).get("tp_size") or 1) for url in sglang_urls]
            # A CUDA IPC handle can be opened only once, so every rank reads a separate pickle.
            copies = sum(ranks) if flat.is_cuda else 1
            payloads = iter([base64.b64encode(pickled(flat, places)) for _ in range(copies)] * (sum(ranks) // copies))
            tail = json.dumps({"load_format": "flattened_bucket", **_version_fields(version)})[1:].encode()
            # Concatenated by hand, because an encoder would scan every byte.
            bodies = {
                url: b'{"serialized_named_tensors":["' + b'","'.join(islice(payloads, count)) + b'"],' + tail
                for url, count in zip(sglang_urls, ranks, strict=True)
            }
            self._request_all(path, bodies.__getitem__, urls=sglang_urls)

    def _load_adapter(self, urls: Sequence[str], tensors: Sequence[NamedTensor], version: str, *, first: bool) -> None:
        """Send an adapter message as bytes in the request to bootstrap/adapter_loader.py in SGLang."""
        flat, places = flatten([(name, tensor.cpu()) for name, tensor in tensors])
        table = [[at.name, dtype_name(at.dtype), list(at.shape), at.start_idx, at.end_idx] for at in places]
        header = {"adapter": self._adapter, "tensors": table, "first": first, "last": not version.endswith(INCOMPLETE)}

        def body(url: str) -> dict[str, Any]:
            info = self._server_info(url)
            encoded = json.dumps(header | {"own": info.get("model_path")}).encode()
            header_bytes = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
            payload = base64.b64encode(pickle.dumps([("header", header_bytes), ("bytes", flat)])).decode()
            return {
                "serialized_named_tensors": [payload] * int(info.get("tp_size") or 1),
                "load_format": ADAPTER_LOADER,
                **_version_fields(version),
            }

        self._request_all("/update_weights_from_tensor", body, urls=urls)

    def _join(self, group: dict[str, Any], offsets: dict[str, int]) -> None:
        self._request_all("/init_weights_update_group", lambda url: {**group, "rank_offset": offsets[url]})

    def load_broadcast(self, forms: Sequence[tuple[str, dtype, tuple[int, ...]]], *, name: str, version: str) -> None:
        """Receive all tensors as one broadcast, in this order. Wider dtypes must come first, as sorted by `aligned`."""
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
        """Leave the group. A worker that does not know it has already left. Waits at most IDLE_TIMEOUT_S."""
        path = "/destroy_weights_update_group"
        for answer in self._ask_all(path, {"group_name": name}, limit_s=IDLE_TIMEOUT_S):
            if answer.refused and "does not exist" not in answer.message:
                raise answer.error()

    def checksums(self) -> list[dict[str, str]]:
        """Return the checksums of every worker's tensors.

        SGLang hashes its own tensors by rank. Those checksums are comparable only with each other.
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

    def loads(self) -> dict[str, int]:
        """Return the number of requests at each worker that answers."""
        replies = ask_all(partial(self._ask, path="/v1/loads", body={}, method="GET"), self.urls, limit_s=LOADS_S)
        answered = [reply for reply in replies if isinstance(reply, WorkerReply) and reply.status == 200]
        return {
            reply.url: sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in reply.body["loads"])
            for reply in answered
        }

    def randomize_weights(self) -> None:
        self._request_all("/weights_checker", {"action": "reset_tensors"})


def _version_fields(version: str) -> dict[str, Any]:
    return {"weight_version": version, "flush_cache": False}


DEVICE_INDEX = 6
"""Index of the device in the arguments of torch's CUDA tensor reduction."""


def flatten(tensors: Sequence[NamedTensor]) -> tuple[Tensor, list[SimpleNamespace]]:
    """Concatenate the bytes of all tensors to one [N] uint8 tensor on their device, and return their ranges."""
    parts, places, end = [], [], 0
    for name, tensor in aligned(tensors):
        part = tensor.detach().contiguous().view(-1).view(torch.uint8)
        start, end = end, end + part.numel()
        places.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=part.numel()
            )
        )
        parts.append(part)
    return torch.cat(parts), places


def pickled(flat: Tensor, places: list[SimpleNamespace]) -> bytes:
    """Pickle a flat buffer as SGLang's load_format "flattened_bucket".

    On a CPU, the pickle has the bytes themselves. A handle of torch's shared memory either leaves a daemon behind, or
    kills SGLang's scheduler unless the receiver knows this process's authentication key. On a GPU, the pickle has a
    CUDA IPC handle, which is valid as long as `flat` lives.
    """
    return pickle.dumps({"flattened_tensor": _Handle(flat) if flat.is_cuda else flat, "metadata": places})


class _Handle:
    """A CUDA tensor that is pickled as in torch.multiprocessing, but with the UUID of its device instead of the index.

    The two processes may number devices differently. SGLang looks up the UUID.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(self.tensor)
        uuid = str(torch.cuda.get_device_properties(arguments[DEVICE_INDEX]).uuid)
        return rebuild, (*arguments[:DEVICE_INDEX], uuid, *arguments[DEVICE_INDEX + 1 :])
