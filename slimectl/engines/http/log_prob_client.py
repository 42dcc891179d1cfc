"""Client of a remote model that only computes log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from slimectl.engines.http.api import ServerApi, UnexpectedAnswer
from slimectl.errors import BackendError, SettingsError
from slimectl.stdio import logger
from slimectl.transport.client import HttpClient, RetryPolicy
from slimectl.types import TrainingSample

ROWS, TOKENS = 16, 16384
"""Maximum rows and tokens of one request."""

PROBE = "The quick brown fox\n\tdef f(x): return x**2 + 3.14159  # naïve café, 北京, здравствуй 🙂 [[1, 20, 300]]"
"""Text of every kind, which two vocabularies tokenise alike only if they are the same."""


class RemoteLogProbModel:
    """protocols.LogProbModel of the model behind `urls`, servers that speak `api`.

    Requests go to the servers round-robin, concurrently. One that a server does not answer goes to the others, once
    each, and then up to `tries` times to the first, within `timeout_s` seconds. `setting` names the setting of the
    addresses. Log-probabilities are those of temperature 1.
    """

    def __init__(self, urls: Sequence[str], *, api: ServerApi, setting: str, timeout_s: float, tries: int = 5) -> None:
        self._api = api
        self._urls = [url.rstrip("/") for url in urls]
        self._setting = setting
        self._patience = RetryPolicy(timeout_s, tries)
        self._failed_urls: set[str] = set()
        """Servers of which a warning has told; cleared by their next answer."""

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        """Return log p(token) of every response token, R floats per row. Raises BackendError if the servers fail."""
        with HttpClient() as asker:
            futures = [
                asker.submit(self._score(i % len(self._urls), batch, asker)) for i, batch in enumerate(_batches(rows))
            ]
            return [log_probs for future in futures for log_probs in future.result()]

    def check_vocabulary(self, tokenizer: Any, *, of: object) -> None:
        """Raise SettingsError if a server tokenises text differently than `tokenizer`, that of the model `of`."""
        expected = list(tokenizer.encode(PROBE, add_special_tokens=False))
        for url in self._urls:
            with HttpClient() as asker:
                server_tokens = asker.submit(self._tokenize(url, asker)).result()
            # The teacher's tokenizer may add special tokens around the text.
            if not any(
                server_tokens[i : i + len(expected)] == expected for i in range(len(server_tokens) - len(expected) + 1)
            ):
                message = f"the model at {url} has another vocabulary than {of}; give a teacher that shares it"
                raise SettingsError(f"{self._setting}: {message}")

    def close(self) -> None:
        """Do nothing: connections end with each request."""

    async def _score(self, first: int, rows: Sequence[TrainingSample], asker: HttpClient) -> list[list[float]]:
        """Ask for the log-probabilities of rows, beginning with the server at `first`."""
        url, starts = self._urls[first], [len(row.tokens) - row.response_length - 1 for row in rows]
        try:
            answers = await self._api.prompt_log_probs(
                partial(self._post_to_any, first, asker), [list(row.tokens) for row in rows], starts
            )
        except UnexpectedAnswer as answer:
            raise self._unexpected_answer(url, str(answer)) from None
        for row, start, pairs in zip(rows, starts, answers, strict=True):
            if [token for token, _ in pairs] != list(row.tokens[start + 1 :]):
                raise self._unexpected_answer(url, "log-probabilities of other tokens than were asked about")
        return [[float(log_prob) for _, log_prob in pairs] for pairs in answers]

    async def _tokenize(self, url: str, asker: HttpClient) -> list[int]:
        try:
            return await self._api.tokenize(partial(self._post, url, asker), PROBE)
        except UnexpectedAnswer as answer:
            raise self._unexpected_answer(url, str(answer)) from None

    async def _post_to_any(self, first: int, asker: HttpClient, path: str, body: Mapping[str, Any]) -> Any:
        """Post to the first server that answers. Raises BackendError if none does while there is patience."""
        once = RetryPolicy(self._patience.timeout_s, tries=1)
        urls = [*self._urls[first:], *self._urls[:first]]
        for url in urls if len(urls) > 1 else ():
            try:
                answer = await asker.post(url + path, body, patience=once, wanted_by="the teacher")
            except BackendError as error:
                if url not in self._failed_urls:
                    self._failed_urls.add(url)
                    logger.warning(f"{error}; the other servers of {self._setting} are asked")
            else:
                self._failed_urls.discard(url)
                return answer
        return await self._post(urls[0], asker, path, body)

    async def _post(self, url: str, asker: HttpClient, path: str, body: Mapping[str, Any]) -> Any:
        return await asker.post(url + path, body, patience=self._patience, wanted_by="the teacher")

    def _unexpected_answer(self, url: str, description: str) -> BackendError:
        return BackendError(f"the teacher at {url}: answered {description}; is it {self._api.name}?")


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
