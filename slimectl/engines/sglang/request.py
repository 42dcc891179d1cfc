"""Generation request to a server, and its answer so far."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slimectl.engines.sglang.recipes import UNPUSHED
from slimectl.types import Completion, SamplingParams

KEPT = {
    "routed_experts": "routed_experts",
    "spec_verify_ct": "spec_verify_ct",
    "spec_num_correct_drafts": "spec_accept_token_num",
    "spec_num_proposed_drafts": "spec_draft_token_num",
    "num_retractions": "num_retractions",
    "dp_rank": "dp_rank",
}
"""Extra metadata of an answer: SGLang's name and ours; copied if present."""


class Unavailable(Exception):
    """Error: the server could not answer now; it, or another, may later."""


class Paused(Unavailable):
    """Error: the server is alive but paused, and reported so after a while."""


def sampling(params: SamplingParams, *, limit: int) -> dict[str, Any]:
    """Convert sampling parameters to SGLang's names, always with a seed.

    In deterministic mode SGLang uses the same seed for all requests without one. Greedy log-probabilities are
    untempered in SGLang too, and all others are of the tempered, unfiltered distribution.
    """
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "max_new_tokens": limit,
        "min_new_tokens": min(params.min_tokens, limit),
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "sampling_seed": (secrets.randbits(63) if params.seed is None else params.seed) % 2**63,
    }


@dataclass(slots=True)
class Flight:
    """Request in flight, retried on other servers if needed; its answer comes from the last server alone."""

    body: dict[str, Any]
    key: int
    """Affinity key: equal prompts have equal keys, and go to the same server, whose prefix cache has them."""

    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer on the client, because SGLang ignores them under ignore_eos."""

    min_tokens: int = 0
    decode: Callable[[list[int]], str] | None = None
    aborted: bool = False
    asking: bool = False
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str = ""
    versions: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None

    def restart(self) -> None:
        """Drop the answer of a failed server, and draw a new request id: the old one may still be running there."""
        self.tokens, self.log_probs, self.text, self.versions, self.meta, self.finish = [], [], "", [], {}, None
        self.body["rid"] = f"slimectl-{uuid.uuid4().hex}"

    def take(self, chunk: dict[str, Any]) -> None:
        """Add one event of the stream, which has the new tokens, or (other servers) all tokens so far.

        Raises Unavailable if they were not sampled with pushed weights.
        """
        meta = chunk["meta_info"]
        self._add_versions(meta)
        ids = chunk.get("output_ids") or []
        count_before, total = len(self.tokens), meta.get("completion_tokens", len(self.tokens) + len(ids))
        is_cumulative = count_before > 0 and len(ids) == total and count_before + len(ids) != total
        scored = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        self.text = chunk.get("text", "") if is_cumulative or not count_before else self.text + chunk.get("text", "")
        self.tokens += ids[count_before:] if is_cumulative else ids
        self.log_probs += scored[count_before:] if is_cumulative else scored
        self.meta |= meta
        reason = meta.get("finish_reason")
        if reason is not None:
            self.finish = reason["type"] if isinstance(reason, dict) else str(reason)
        self._apply_stop_tokens(count_before)

    def _add_versions(self, meta: dict[str, Any]) -> None:
        spans = meta.get("weight_versions") or ([meta["weight_version"]] if "weight_version" in meta else [])
        versions = [span["version"] if isinstance(span, dict) else span for span in spans]
        if UNPUSHED in versions:
            raise Unavailable("it has no weights yet")
        if len(versions) > 1:
            self.versions = versions
        elif versions and self.versions[-1:] != versions:
            self.versions += versions

    def _apply_stop_tokens(self, count_before: int) -> None:
        for position in range(max(count_before, self.min_tokens - 1), len(self.tokens)) if self.stop_tokens else ():
            if self.tokens[position] in self.stop_tokens:
                del self.tokens[position + 1 :], self.log_probs[position + 1 :]
                self.finish = "stop"
                self.meta["finish_reason"] = None
                return

    def completion(self, finish: str | None = None) -> Completion:
        length = min(len(self.tokens), len(self.log_probs))
        reason = self.meta.get("finish_reason")
        cut = isinstance(reason, dict) and isinstance(reason.get("matched"), str)
        tokens = self.tokens[:length]
        return Completion(
            tokens=tokens,
            log_probs=self.log_probs[:length],
            text=self.text if cut or self.decode is None else self.decode(tokens),
            finish=finish or self.finish or "abort",
            weight_versions=self.versions,
            cached_tokens=self.meta.get("cached_tokens") or 0,
            extras={ours: self.meta[name] for name, ours in KEPT.items() if self.meta.get(name) is not None},
        )
