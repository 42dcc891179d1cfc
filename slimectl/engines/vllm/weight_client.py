"""Pushes weights to vLLM 0.32.0 through its weight-transfer protocol, or by a reload from disk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
from torch import Tensor, dtype

from slimectl.engines.http.weight_client import IDLE_TIMEOUT_S, HttpWorkers, dtype_name
from slimectl.errors import BackendError
from slimectl.protocols import INCOMPLETE

PAUSE_MODES = {"in_place": "keep", "retract": "keep", "abort": "abort"}
NOT_HASHED = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA-256 of no bytes: the checksum of a weight that vLLM has packed for a CPU and removed."""
RETRY_S = 0.1


def in_progress(version: str) -> str:
    """Return the version of partly loaded weights."""
    return version if version.endswith(INCOMPLETE) else version + INCOMPLETE


class VllmWorkers(HttpWorkers):
    """engines.http.weight_client.HttpWorkers for vLLM servers started by engines.vllm.launch.

    Their workers run our extension and transfer engine (bootstrap/worker_extension.py).
    """

    shares_memory = True
    adapter_transports = ("tensor", "distributed")

    @property
    def ranks(self) -> list[int]:
        answers = self._request_all("/get_world_size", {}, method="GET")
        return [int(answer.body["world_size"]) for answer in answers]

    # --- around an update ------------------------------------------------------------------------------------------

    def _pause(self, mode: str) -> None:
        self._request_all("/pause?" + urlencode({"mode": PAUSE_MODES[mode]}), {})

    async def _resume(self, session: aiohttp.ClientSession, url: str) -> None:
        # An update may still be open, from another process that died or was interrupted.
        answers = [await self._ask(session, url, "/collective_rpc", {"method": "end_update"})]
        flushed = await self._flush(session, url)
        # Even after a failure, because an engine must not stay paused.
        answers += [flushed, await self._ask(session, url, "/resume", {})]
        for answer in answers:
            # With mode in_place, the cache of responses in flight is kept on purpose.
            if answer.refused and not (answer is flushed and self._mode == "in_place" and answer.status == 200):
                raise answer.error()

    async def _flush(self, session: aiohttp.ClientSession, url: str) -> Any:
        """Flush the prefix cache.

        Retracted responses recompute their keys and values, and aborted ones are about to end.
        """
        path = "/reset_prefix_cache"
        if self._mode == "retract":
            return await self._ask(session, url, path + "?reset_running_requests=true", {})
        answer = await self._ask(session, url, path, {})
        for _ in range(int(IDLE_TIMEOUT_S / RETRY_S) if self._mode == "abort" else 0):
            if not answer.refused:
                break
            await asyncio.sleep(RETRY_S)
            answer = await self._ask(session, url, path, {})
        return answer

    def _open_session(self) -> None:
        self._request_all("/start_weight_update", {})

    def sleep(self) -> None:
        self._request_all("/sleep?level=2&mode=abort", {})

    def wake(self) -> None:
        self._request_all("/wake_up", {})

    # --- updates ---------------------------------------------------------------------------------------------------

    def load_disk(self, folder: Path, *, version: str, delta: Path | None = None) -> None:
        self._name_weights(in_progress(version))
        kwargs = {"weights_path": str(Path(folder).resolve())}
        self._request_all("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        self._name_weights(version)

    def load_tensors(self, tensors: Sequence[tuple[str, Tensor]], *, version: str) -> None:
        self._begin_update()
        self._load(self._shared_block(tensors), version)

    def _join(self, group: dict[str, Any], offsets: dict[str, int]) -> None:
        path = "/init_weight_transfer_engine"
        self._request_all(
            path, lambda url: {"init_info": {**group, "rank_offset": offsets[url], "timeout_s": self.timeout_s}}
        )

    def load_broadcast(self, forms: Sequence[tuple[str, dtype, tuple[int, ...]]], *, name: str, version: str) -> None:
        """Receive all tensors as one broadcast, in this order. Wider dtypes must come first, as sorted by `aligned`."""
        self._begin_update()
        rows, end = [], 0
        for tensor_name, kind, shape in forms:
            rows.append([tensor_name, dtype_name(kind), list(shape), end])
            size = kind.itemsize
            for length in shape:
                size *= length
            end += size
        self._load({"group_name": name, "tensors": rows}, version)

    def leave(self, *, name: str) -> None:
        """Leave all groups. Waits at most IDLE_TIMEOUT_S."""
        for answer in self._ask_all("/shutdown_weight_transfer_engine", {}, limit_s=IDLE_TIMEOUT_S):
            if answer.refused and "during a weight update" not in answer.message:
                raise answer.error()

    def checksums(self) -> list[dict[str, str]]:
        by_worker = []
        for answer in self._request_all("/weight_checker", {"action": "checksum"}):
            by_worker.append(answer.body["checksums"])
            if NOT_HASHED in by_worker[-1].values():
                raise BackendError(
                    f"engine at {answer.url} has no checksums of packed weights. Start it with "
                    f"sync.check_weight_update_equal = true, or SLIMECTL_VLLM_KEEP_WEIGHTS=1."
                )
        return by_worker

    def randomize_weights(self) -> None:
        self._request_all("/weight_checker", {"action": "reset"})

    def _load(self, message: dict[str, Any], version: str) -> None:
        self._name_weights(in_progress(version))
        if self._adapter is not None:
            message |= {"adapter": self._adapter, "last": version != in_progress(version)}
        self._request_all("/update_weights", {"update_info": message})
        if version != in_progress(version):
            self._request_all("/finish_weight_update", {"weight_version": version})
            self._session_open = False

    def _name_weights(self, version: str) -> None:
        self._request_all("/update_weight_version", {"new_version": version})
