"""Search agent: the model writes `<search>words</search>` and reads the passages that BM25 ranks best."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from slimectl.data.chat import Conversation, Generate
from slimectl.errors import RecordError
from slimectl.types import Sample, SamplingParams

CALL = re.compile(r"<search>(.*?)</search>", re.DOTALL)
WORD = re.compile(r"\w+")


class Bm25:
    """Okapi BM25 over passages (Robertson and Zaragoza 2009, eq. 3.15, with the idf of Lucene, which is positive)."""

    def __init__(self, passages: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        self.passages = passages
        self._counts = [Counter(_words(passage)) for passage in passages]
        self._lengths = [counts.total() for counts in self._counts]
        self._mean = sum(self._lengths) / max(1, len(passages)) or 1.0
        document_counts = Counter(word for counts in self._counts for word in counts)
        size = len(passages)
        self._idf = {word: math.log(1 + (size - n + 0.5) / (n + 0.5)) for word, n in document_counts.items()}
        self._k1, self._b = k1, b

    def score(self, query: str, i: int) -> float:
        counts, norm = self._counts[i], self._k1 * (1 - self._b + self._b * self._lengths[i] / self._mean)
        terms = ((self._idf[word], counts[word]) for word in _words(query) if word in counts)
        return sum(idf * n * (self._k1 + 1) / (n + norm) for idf, n in terms)

    def best(self, query: str, count: int = 2) -> list[str]:
        """Return the best passages, best first. Leaves out passages that contain no query word."""
        scores = [(self.score(query, i), -i) for i in range(len(self.passages))]
        ranked = sorted((pair for pair in scores if pair[0] > 0), reverse=True)
        return [self.passages[-i] for _, i in ranked[:count]]


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


@cache
def index_of(path: str) -> Bm25:
    """Return the index of a text file whose passages are separated by blank lines."""
    text = Path(path).read_text(encoding="utf-8")
    return Bm25([part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()])


async def generate(
    args: Any, sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any
) -> Sample:
    """Answer with search in the file `metadata.corpus`, if rollout.allow_paths_in_records allows that."""
    conversation = Conversation(sample, tokenizer, generate, sampling_params, max_turns=4)
    prompt = f"prompt {sample.group_index}: metadata.corpus"
    if "corpus" not in sample.metadata:
        raise RecordError(f"{prompt}: missing. Set it to the text file to search in.")
    if not args.rollout.allow_paths_in_records:
        raise RecordError(
            f"{prompt}: is a file path, and prompts may not choose files to read. Set rollout.allow_paths_in_records = "
            f"true if you trust them."
        )
    index = index_of(sample.metadata["corpus"])
    while (message := await conversation.ask()) is not None:
        queries = CALL.findall(message)
        if not queries:
            break
        with conversation.tool():
            passages = index.best(queries[-1])
        conversation.tell({"role": "user", "content": "\n\n".join(passages) or "nothing found"})
    return sample


generate.resumes = True  # type: ignore[attr-defined]
