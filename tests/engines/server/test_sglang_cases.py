"""SGLang's server cases, asked of `slimectl serve` and of `slimectl serve --record`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from model_families import FAMILIES, SHAPE
from sglang_cases import CASES, CONTEXT, TEMPLATE, Client, outcome
from transformers import AutoTokenizer

from slimectl.agents.recorder import SessionRecorder
from slimectl.checkpoints.create import create_model
from slimectl.types import SamplingParams

REFUSED = {
    "ebnf": "ebnf",
    "structural tag": "response_format.type",
    "stop regex completion": "stop_regex",
    "stop regex chat": "stop_regex",
    "token_ids_logprob [-1]": "token_ids_logprob",
    "token_ids_logprob [[0]]": "token_ids_logprob",
    "custom_logit_processor x": "custom_logit_processor",
    "return_hidden_states True": "return_hidden_states",
}
"""Key that the refusal of a case names."""
REFUSED_BY_RECORD = {
    "regex chat": "regex",
    "json mode": "logit_bias",
    "penalty": "frequency_penalty",
    "continuous usage enabled=True": "stream_options.continuous_usage_stats",
    "stop string|stop end token|ignored end": "logit_bias",
    "return token ids": "return_token_ids",
}
"""The same where sessions are recorded, by a pattern of the names."""


@pytest.fixture(scope="module", params=["serve", "record"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]
) -> Iterator[tuple[str, Client]]:
    """Clients of a server, with the kind of the server."""
    folder: Path = tmp_path_factory.mktemp("cases") / "tiny"
    create_model(SHAPE | FAMILIES["llama"] | {"max_position_embeddings": CONTEXT}, folder, seed=7)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    recorder = None
    if request.param == "record":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        recorder = SessionRecorder(tokenizer, SamplingParams(max_tokens=CONTEXT), CONTEXT, write=lambda sample: None)
    with serving(folder, extension=recorder) as server, httpx.Client(base_url=server.url, timeout=60) as native:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="admin-key-of-the-tests", max_retries=0)
        yield request.param, Client(api, native)


def expected(case: str, kind: str) -> str:
    by_record = [key for pattern, key in REFUSED_BY_RECORD.items() if re.match(pattern, case)]
    return by_record[0] if kind == "record" and by_record else REFUSED.get(case, "passed")


@pytest.mark.parametrize("case", CASES)
def test_a_case_of_sglang_is_answered_or_refused_by_name(case: str, client: tuple[str, Client]) -> None:
    kind, asked = client
    assert outcome(case, asked) == expected(case, kind)
