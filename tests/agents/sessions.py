"""Sessions for tests: a tokenizer with merges, scripted engines, and chat templates of several shapes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from slimectl.agents.answer import AnswerReader
from slimectl.agents.session import Session, SessionLimits
from slimectl.protocols import OnTokens
from slimectl.types import Completion, SamplingParams

CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS_HEAD = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
CHATML = (
    TOOLS_HEAD
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + HEADER
)
FORGETFUL = (
    TOOLS_HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ (m.content or '').split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + HEADER
    + "{% if add_generation_prompt %}<think>\n{% endif %}"
)
"""As of models that reason: the reasoning of earlier answers is not shown again."""
STRICT = (
    "{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}{% set ns = namespace(called=false) %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if not ns.called %}{{ raise_exception('no call before') }}{% endif %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.role == 'assistant' %}{% set ns.called = m.tool_calls is defined %} {{ m.content }}"
    + CALLS
    + "<|im_end|>{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
)
"""Takes the result of a tool only after a call, and has no header of the assistant's turn."""
GROUPED = (
    TOOLS_HEAD
    + "{% for m in messages %}{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "<|im_start|>user{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + CALLS + "<|im_end|>\n{% endif %}{% endfor %}" + HEADER
)
"""Puts the results of several calls into one message, as Qwen's."""
TEMPLATES = {"chatml": CHATML, "forgetful": FORGETFUL, "strict": STRICT, "grouped": GROUPED}

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@cache
def _merging_backend() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    words = [
        "user assistant system tool arguments name add",
        "the sum of the numbers is seven",
        "result more than that",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    backend.train_from_iterator(words * 20, trainer)
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return backend


def merging_tokenizer(template: str = CHATML, *, special: Sequence[str] = ()) -> Any:
    """A byte-level BPE tokenizer with some merges, so that a text has several tokenisations; `special` are tokens."""
    from tokenizers import AddedToken, Tokenizer

    backend = _merging_backend()
    if special:
        backend = Tokenizer.from_str(backend.to_str())
        backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


class ScriptedEngine:
    """Answers with given token lists, one after another, and logs what it was asked."""

    def __init__(self, answers: Sequence[list[int]] | Callable[[int], list[int]], tokenizer: Any) -> None:
        self._answers = answers if callable(answers) else lambda i: answers[i % len(answers)]
        self._tokenizer = tokenizer
        self.log: list[tuple[list[int], list[int], SamplingParams]] = []

    async def generate(
        self, tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None
    ) -> Completion:
        answer = self._answers(len(self.log))[: params.max_tokens]
        self.log.append((list(tokens), answer, params))
        if on_tokens is not None:
            for i, token in enumerate(answer):
                on_tokens(i, [token])
                await asyncio.sleep(0)
        text = self._tokenizer.decode(answer, skip_special_tokens=True)
        for stop in params.stop:
            text = text.partition(stop)[0]
        ended = bool(answer) and answer[-1] == self._tokenizer.eos_token_id
        log_probs = [-0.25 - i / 100 for i in range(len(answer))]
        return Completion(answer, log_probs, text, "stop" if ended else "length", weight_versions=["0"])


def session_of(
    engine: ScriptedEngine,
    tokenizer: Any,
    *,
    turns: int = 64,
    response_tokens: int = 100_000,
    context: int | None = None,
    **sampling: Any,
) -> Session:
    limits = SessionLimits(turns, response_tokens, context)
    params = SamplingParams(max_tokens=response_tokens, **sampling)
    return Session(tokenizer, AnswerReader(tokenizer), engine.generate, params, limits)


def call_text(name: str = "add", **arguments: Any) -> str:
    """A call of a tool in the notation of the templates."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
