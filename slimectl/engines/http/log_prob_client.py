"""Client of a remote model that only computes token log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from slimectl.engines.http.api import ScoredToken, ServerApi, UnexpectedAnswer
from slimectl.errors import BackendError, SettingsError
from slimectl.system.client import HttpClient, RetryPolicy
from slimectl.system.stdio import logger
from slimectl.types import TopTokens, TrainingSample

ROWS, TOKENS = 16, 16384
"""Maximum rows and tokens of one request. With the k likeliest tokens of every position, 1 / k as many tokens."""

PROBE = "The quick brown fox\n\tdef f(x): return x**2 + 3.14159  # naïve café, 北京, здравствуй 🙂 [[1, 20, 300]]"
"""Varied text, which two tokenizers split alike only if they have the same vocabulary."""


class RemoteLogProbModel:
    """protocols.LogProbModel over HTTP, for the model served at `urls` through `api`.

    Requests go to the servers round-robin and concurrently. If a server fails, the request goes to each of the others
    once, and then up to `tries` times to the first one, within `timeout_s` seconds. `setting` is the setting that lists
    the addresses, for messages. Log-probabilities are at temperature 1.
    """

    def __init__(self, urls: Sequence[str], *, api: ServerApi, setting: str, timeout_s: float, tries: int = 5) -> None:
        self._api = api
        self._urls = [url.rstrip("/") for url in urls]
        self._setting = setting
        self._patience = RetryPolicy(timeout_s, tries)
        self._failed_urls: set[str] = set()
        """Servers that a warning has been logged for. Their next response clears them."""

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        """Return log p(token) of every response token, R floats per row. Raises BackendError if all servers fail."""
        return [[float(score.log_prob) for score in scores] for scores in self._scores(rows)]

    def top_log_probs(self, rows: Sequence[TrainingSample], k: int) -> list[list[TopTokens]]:
        """Return the `k` likeliest tokens in place of every response token. Raises BackendError if all servers fail."""
        return [[score.top for score in scores] for scores in self._scores(rows, top=k)]

    def check_vocabulary(self, tokenizer: Any, *, of: object) -> None:
        """Raise SettingsError if a server tokenizes text differently than `tokenizer` of the model `of`."""
        expected = list(tokenizer.encode(PROBE, add_special_tokens=False))
        for url in self._urls:
            with HttpClient() as http:
                server_tokens = http.submit(self._tokenize(url, http)).result()
            # The teacher's tokenizer may add special tokens around the text.
            if not any(
                server_tokens[i : i + len(expected)] == expected for i in range(len(server_tokens) - len(expected) + 1)
            ):
                message = (
                    f"the model at {url} has a different vocabulary than {of}. Use a teacher with the same vocabulary."
                )
                raise SettingsError(f"{self._setting}: {message}")

    def close(self) -> None:
        """Do nothing, because connections close after each call."""

    def _scores(self, rows: Sequence[TrainingSample], *, top: int = 0) -> list[list[ScoredToken]]:
        """Return the scores of every response token, with the `top` likeliest tokens in its place."""
        tokens_per_request = max(1, TOKENS // max(1, top))
        with HttpClient() as http:
            futures = [
                http.submit(self._score(i % len(self._urls), batch, http, top))
                for i, batch in enumerate(_batches(rows, tokens_per_request))
            ]
            return [scores for future in futures for scores in future.result()]

    async def _score(
        self, first: int, rows: Sequence[TrainingSample], http: HttpClient, top: int
    ) -> list[list[ScoredToken]]:
        """Return the scores of rows. Tries the server at index `first` first."""
        url, starts = self._urls[first], [len(row.tokens) - row.response_length - 1 for row in rows]
        try:
            answers = await self._api.prompt_log_probs(
                partial(self._post_to_any, first, http), [list(row.tokens) for row in rows], starts, top=top
            )
        except UnexpectedAnswer as answer:
            raise self._unexpected_answer(url, str(answer)) from None
        for row, start, scores in zip(rows, starts, answers, strict=True):
            if [score.token for score in scores] != list(row.tokens[start + 1 :]):
                raise self._unexpected_answer(url, "with log-probabilities of other tokens than requested")
            if any(len(score.top) < top for score in scores):
                raise self._unexpected_answer(url, f"with fewer than the {top} likeliest tokens at a position")
        return answers

    async def _tokenize(self, url: str, http: HttpClient) -> list[int]:
        try:
            return await self._api.tokenize(partial(self._post, url, http), PROBE)
        except UnexpectedAnswer as answer:
            raise self._unexpected_answer(url, str(answer)) from None

    async def _post_to_any(self, first: int, http: HttpClient, path: str, body: Mapping[str, Any]) -> Any:
        """Post to the first server that responds. Raises BackendError if none does within the retry policy."""
        once = RetryPolicy(self._patience.timeout_s, tries=1)
        urls = [*self._urls[first:], *self._urls[:first]]
        for url in urls if len(urls) > 1 else ():
            try:
                answer = await http.post(url + path, body, patience=once, wanted_by="the teacher")
            except BackendError as error:
                if url not in self._failed_urls:
                    self._failed_urls.add(url)
                    logger.warning(f"{error}. Trying the other servers of {self._setting}.")
            else:
                self._failed_urls.discard(url)
                return answer
        return await self._post(urls[0], http, path, body)

    async def _post(self, url: str, http: HttpClient, path: str, body: Mapping[str, Any]) -> Any:
        return await http.post(url + path, body, patience=self._patience, wanted_by="the teacher")

    def _unexpected_answer(self, url: str, description: str) -> BackendError:
        return BackendError(f"the teacher at {url} answered {description}. Is it {self._api.name}?")


def _batches(rows: Sequence[TrainingSample], limit: int) -> Iterator[list[TrainingSample]]:
    """Split rows into batches of up to `limit` tokens, one per request, in order."""
    batch: list[TrainingSample] = []
    tokens = 0
    for row in rows:
        if batch and (len(batch) == ROWS or tokens + len(row.tokens) > limit):
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += len(row.tokens)
    if batch:
        yield batch
