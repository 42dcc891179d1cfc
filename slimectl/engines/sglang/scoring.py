"""A model behind servers that is only asked how likely given tokens are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slimectl.errors import BackendError, SettingsError
from slimectl.rewards.asking import Asker, Patience
from slimectl.types import Row

ROWS, TOKENS = 16, 16384
"""What one request asks about at most."""

PROBE = "The quick brown fox\n\tdef f(x): return x**2 + 3.14159  # naïve café, 北京, здравствуй 🙂 [[1, 20, 300]]"
"""Text of every kind, which two vocabularies cut alike only if they are one."""


class ServedModel:
    """ports.LogProbs of the model behind `urls`: SGLang's servers, or `slimectl serve`.

    Requests go to the servers in turn, all at once; each may be tried `tries` times within `timeout_s` seconds.
    `setting` names where the addresses come from. Log-probabilities are those of temperature 1.
    """

    def __init__(self, urls: Sequence[str], *, setting: str, timeout_s: float, tries: int = 5) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._setting = setting
        self._patience = Patience(timeout_s, tries)

    def log_probs(self, rows: Sequence[Row]) -> list[list[float]]:
        """log p(token) of every response token, R floats a row. Raises BackendError if they cannot be had."""
        with Asker() as asker:
            asked = [
                asker.submit(self._judged(self._urls[i % len(self._urls)], batch, asker))
                for i, batch in enumerate(_batches(rows))
            ]
            return [log_probs for future in asked for log_probs in future.result()]

    def check_vocabulary(self, tokenizer: Any, *, of: object) -> None:
        """Raises SettingsError if a server cuts text into other tokens than `tokenizer`, that of the model `of`."""
        own = list(tokenizer.encode(PROBE, add_special_tokens=False))
        for url in self._urls:
            with Asker() as asker:
                (reply,) = asker.submit(self._asked(url, {"text": [PROBE], "logprob_start_len": 0}, asker)).result()
            found = [token for _, token in self._pairs(url, reply)]
            # Around it may stand what the teacher's tokenizer puts around every text.
            if not any(found[i : i + len(own)] == own for i in range(len(found) - len(own) + 1)):
                told = f"the model at {url} has another vocabulary than {of}; give a teacher that shares it"
                raise SettingsError(f"{self._setting}: {told}")

    def close(self) -> None:
        """Connections end with each question."""

    async def _judged(self, url: str, rows: Sequence[Row], asker: Asker) -> list[list[float]]:
        begins = [len(row.tokens) - row.response_length - 1 for row in rows]
        asked = {"input_ids": [list(row.tokens) for row in rows], "logprob_start_len": begins}
        found = []
        for row, start, reply in zip(rows, begins, await self._asked(url, asked, asker), strict=True):
            pairs = self._pairs(url, reply)
            if [token for _, token in pairs] != list(row.tokens[start:]):
                raise self._strange(url, "log-probabilities of other tokens than were asked about")
            found.append([float(log_prob) for log_prob, _ in pairs[1:]])
        return found

    async def _asked(self, url: str, asked: dict[str, Any], asker: Asker) -> list[Any]:
        nothing = {"max_new_tokens": 0, "temperature": 1.0}
        body = {**asked, "return_logprob": True, "sampling_params": nothing}
        reply = await asker.post(f"{url}/generate", body, patience=self._patience, wanted_by="the teacher")
        wanted = len(asked["logprob_start_len"]) if isinstance(asked["logprob_start_len"], list) else 1
        if not isinstance(reply, list) or len(reply) != wanted:
            raise self._strange(url, f"{str(reply)[:60]!r} to {wanted} prompts")
        return reply

    def _pairs(self, url: str, reply: Any) -> list[list[Any]]:
        """[log-probability, token] of the prompt's tokens."""
        try:
            return [[log_prob, token] for log_prob, token, *_ in reply["meta_info"]["input_token_logprobs"]]
        except (KeyError, TypeError, ValueError):
            raise self._strange(url, f"{str(reply)[:60]!r}") from None

    def _strange(self, url: str, what: str) -> BackendError:
        return BackendError(f"the teacher at {url}: answered {what}; is it SGLang or `slimectl serve`?")


def _batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows in order, as many as one request may ask about."""
    batch: list[Row] = []
    tokens = 0
    for row in rows:
        if batch and (len(batch) == ROWS or tokens + len(row.tokens) > TOKENS):
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += len(row.tokens)
    if batch:
        yield batch
