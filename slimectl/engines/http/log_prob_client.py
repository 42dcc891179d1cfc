"""Client of a remote model that only computes log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slimectl.errors import BackendError, SettingsError
from slimectl.rewards.http import HttpClient, RetryPolicy
from slimectl.types import TrainingSample

ROWS, TOKENS = 16, 16384
"""Maximum rows and tokens of one request."""

PROBE = "The quick brown fox\n\tdef f(x): return x**2 + 3.14159  # naïve café, 北京, здравствуй 🙂 [[1, 20, 300]]"
"""Text of every kind, which two vocabularies tokenise alike only if they are the same."""


class RemoteLogProbModel:
    """protocols.LogProbModel of the model behind `urls`: SGLang's servers, or `slimectl serve`.

    Requests go to the servers round-robin, concurrently; each may be tried `tries` times within `timeout_s` seconds.
    `setting` names the setting of the addresses. Log-probabilities are those of temperature 1.
    """

    def __init__(self, urls: Sequence[str], *, setting: str, timeout_s: float, tries: int = 5) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._setting = setting
        self._patience = RetryPolicy(timeout_s, tries)

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        """Return log p(token) of every response token, R floats per row. Raises BackendError if the servers fail."""
        with HttpClient() as asker:
            futures = [
                asker.submit(self._score(self._urls[i % len(self._urls)], batch, asker))
                for i, batch in enumerate(_batches(rows))
            ]
            return [log_probs for future in futures for log_probs in future.result()]

    def check_vocabulary(self, tokenizer: Any, *, of: object) -> None:
        """Raise SettingsError if a server tokenises text differently than `tokenizer`, that of the model `of`."""
        expected = list(tokenizer.encode(PROBE, add_special_tokens=False))
        for url in self._urls:
            with HttpClient() as asker:
                (reply,) = asker.submit(self._request(url, {"text": [PROBE], "logprob_start_len": 0}, asker)).result()
            server_tokens = [token for _, token in self._pairs(url, reply)]
            # The teacher's tokenizer may add special tokens around the text.
            if not any(
                server_tokens[i : i + len(expected)] == expected for i in range(len(server_tokens) - len(expected) + 1)
            ):
                message = f"the model at {url} has another vocabulary than {of}; give a teacher that shares it"
                raise SettingsError(f"{self._setting}: {message}")

    def close(self) -> None:
        """Do nothing: connections end with each request."""

    async def _score(self, url: str, rows: Sequence[TrainingSample], asker: HttpClient) -> list[list[float]]:
        starts = [len(row.tokens) - row.response_length - 1 for row in rows]
        query = {"input_ids": [list(row.tokens) for row in rows], "logprob_start_len": starts}
        results = []
        for row, start, reply in zip(rows, starts, await self._request(url, query, asker), strict=True):
            pairs = self._pairs(url, reply)
            if [token for _, token in pairs] != list(row.tokens[start:]):
                raise self._unexpected_answer(url, "log-probabilities of other tokens than were asked about")
            results.append([float(log_prob) for log_prob, _ in pairs[1:]])
        return results

    async def _request(self, url: str, query: dict[str, Any], asker: HttpClient) -> list[Any]:
        params = {"max_new_tokens": 0, "temperature": 1.0}
        body = {**query, "return_logprob": True, "sampling_params": params}
        reply = await asker.post(f"{url}/generate", body, patience=self._patience, wanted_by="the teacher")
        count = len(query["logprob_start_len"]) if isinstance(query["logprob_start_len"], list) else 1
        if not isinstance(reply, list) or len(reply) != count:
            raise self._unexpected_answer(url, f"{str(reply)[:60]!r} to {count} prompts")
        return reply

    def _pairs(self, url: str, reply: Any) -> list[list[Any]]:
        """Return [log-probability, token] of the prompt's tokens."""
        try:
            return [[log_prob, token] for log_prob, token, *_ in reply["meta_info"]["input_token_logprobs"]]
        except (KeyError, TypeError, ValueError):
            raise self._unexpected_answer(url, f"{str(reply)[:60]!r}") from None

    def _unexpected_answer(self, url: str, description: str) -> BackendError:
        return BackendError(f"the teacher at {url}: answered {description}; is it SGLang or `slimectl serve`?")


def _batches(rows: Sequence[TrainingSample]) -> Iterator[list[TrainingSample]]:
    """Split rows into batches of at most one request, in order."""
    batch: list[TrainingSample] = []
    tokens = 0
    for row in rows:
        if batch and (len(batch) == ROWS or tokens + len(row.tokens) > TOKENS):
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += len(row.tokens)
    if batch:
        yield batch
