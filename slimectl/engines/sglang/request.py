"""What is asked of a server, and what has come of the answer so far."""

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
"""What an answer says beside text, tokens and versions, as SGLang names it and as we do; kept where it is there."""


class Unavailable(Exception):
    """The server could not answer now; it, or another, may later."""


class Paused(Unavailable):
    """The server lives but is paused, and has said so after a while."""


def sampling(params: SamplingParams, *, limit: int) -> dict[str, Any]:
    """SGLang's names. A seed is always sent: in deterministic mode SGLang gives all requests without one the same.

    Greedy log-probabilities are untempered in SGLang too, and all others are of the tempered, whole distribution.
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
    """One request on its way, from server to server if need be; what has come is of the last server alone."""

    body: dict[str, Any]
    key: int
    """Equal prompts have equal keys: they go to the same server, whose prefix cache knows them."""

    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end the answer here, because SGLang heeds none of them under ignore_eos."""

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
        """Forget what came from a server that is gone; ask under a new name, for the old one may still live there."""
        self.tokens, self.log_probs, self.text, self.versions, self.meta, self.finish = [], [], "", [], {}, None
        self.body["rid"] = f"slimectl-{uuid.uuid4().hex}"

    def take(self, chunk: dict[str, Any]) -> None:
        """One event of the stream, which brings what is new, or (other servers) all there is.

        Raises Unavailable if these are not words of the weights that were pushed.
        """
        meta = chunk["meta_info"]
        self._take_versions(meta)
        ids = chunk.get("output_ids") or []
        seen, total = len(self.tokens), meta.get("completion_tokens", len(self.tokens) + len(ids))
        whole = seen > 0 and len(ids) == total and seen + len(ids) != total
        scored = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        self.text = chunk.get("text", "") if whole or not seen else self.text + chunk.get("text", "")
        self.tokens += ids[seen:] if whole else ids
        self.log_probs += scored[seen:] if whole else scored
        self.meta |= meta
        reason = meta.get("finish_reason")
        if reason is not None:
            self.finish = reason["type"] if isinstance(reason, dict) else str(reason)
        self._stop_here(seen)

    def _take_versions(self, meta: dict[str, Any]) -> None:
        spans = meta.get("weight_versions") or ([meta["weight_version"]] if "weight_version" in meta else [])
        named = [span["version"] if isinstance(span, dict) else span for span in spans]
        if UNPUSHED in named:
            raise Unavailable("it has no weights yet")
        if len(named) > 1:
            self.versions = named
        elif named and self.versions[-1:] != named:
            self.versions += named

    def _stop_here(self, seen: int) -> None:
        for at in range(max(seen, self.min_tokens - 1), len(self.tokens)) if self.stop_tokens else ():
            if self.tokens[at] in self.stop_tokens:
                del self.tokens[at + 1 :], self.log_probs[at + 1 :]
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
