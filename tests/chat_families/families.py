"""Chat templates of published model families, written for the tests, with their renderings worked out by hand.

NAME.jinja behaves like the family's published template in all that decides which tokens stand where. The prose around
tools and long default system messages are shortened. NAME.toml has what a person worked out from the published format:
in its renderings « and » enclose what supervised training must teach, and ‹ and › what a turn's end needs although the
template does not show it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from slimectl.types import Chat

DAY = datetime(2026, 1, 2)
FOLDER = Path(__file__).parent
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHAT: Chat = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": " 2+2?"},
    {"role": "assistant", "content": "Four."},
]
ARGUMENTS = {"city": "Paris"}


@dataclass(frozen=True)
class Rendering:
    """The text of a conversation, the spans of it that are taught, and the prompt of its last turn."""

    text: str
    taught: list[str]
    prompt: str


@dataclass(frozen=True)
class Family:
    """One family: its tokens, what its template reads, and what it renders."""

    name: str
    models: str
    """The published models that share the format."""
    eos: str
    """The end token of the tokenizer."""
    stops: tuple[str, ...]
    """Tokens at which the engine stops: those of generation_config.json, config.json and the tokenizer."""
    chat: str
    """CHAT rendered, without its system message where the template does not show one."""
    system: str
    """shown, ignored, refused, or in prompts only."""
    developer: str
    """shown, ignored or refused."""
    parts: str
    """Content that is a list of text parts: read, ignored, refused, or repr (printed as Python writes a list)."""
    tools: str
    """shown or ignored."""
    think_tags: str
    """Thinking in the content of the last turn, before </think>: text (as it stands), read, or dropped."""
    bos: str = ""
    adds_bos: bool = False
    """Whether the tokenizer puts `bos` before a raw text."""
    special: tuple[str, ...] = ()
    """Other special tokens."""
    added: tuple[str, ...] = ()
    """Added tokens that are not special."""
    arguments: str = ""
    """What the arguments of a call must be: object, text, or object or text; empty where calls are not shown."""
    null_content: str = "empty"
    """What content that is null becomes beside calls: empty, None (printed), refused, or required (else no calls)."""
    calls_a_turn: int = 2
    """Most calls of one turn."""
    call_id: str = "call00001"
    """The id of the call in CALLS."""
    says_and_calls: bool = True
    """Whether a turn may have text and calls."""
    reasoning: str = ""
    """The key of a message that holds its reasoning; empty where the template reads none."""
    earlier: str = ""
    """Reasoning of turns before the last question: dropped or kept."""
    date: bool = False
    """Whether the template prints today's date."""
    earlier_end: str = ""
    """The end of a turn that is not the last, where it is none of `stops`. It is not taught."""
    ends_turns: bool = True
    """Whether turns end with one of `stops`. Where they do not, nothing can teach a model to stop."""
    opens: str = ""
    """What the generation prompt adds to the text before the last turn of `chat`."""
    call_opens: str = ""
    """The same for `calls`."""
    thought_opens: str = ""
    """The same for `thoughts`."""
    calls: str = ""
    """CALLS rendered with TOOL."""
    thoughts: str = ""
    """CHAT without its system message, with reasoning, rendered."""
    notes: str = ""

    @property
    def template(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Template arguments that set the date."""
        return {"strftime_now": DAY.date().isoformat()} if self.date else {}

    @property
    def conversation(self) -> Chat:
        return CHAT if self.system == "shown" else CHAT[1:]

    @property
    def call_conversation(self) -> Chat:
        """A question, a call of TOOL, its result and the answer, in the form that the template prints right."""
        arguments = json.dumps(ARGUMENTS) if self.arguments == "text" else ARGUMENTS
        return call_chat(arguments, None if self.null_content == "required" else "", self.call_id)

    @property
    def thinking_conversation(self) -> Chat:
        [_, first, second, third, fourth] = CHAT
        return [first, {**second, self.reasoning: "Easy."}, third, {**fourth, self.reasoning: "Hard."}]

    def rendering(self, name: str) -> Rendering:
        """Read `chat`, `calls` or `thoughts`."""
        marked = getattr(self, name)
        for placeholder, value in PLACEHOLDERS.items():
            marked = marked.replace(placeholder, value)
        text = re.sub("‹.*?›", "", marked, flags=re.DOTALL)
        taught = [re.sub("[‹›]", "", span) for span in re.findall("«(.*?)»", marked, flags=re.DOTALL)]
        before = text.rpartition("«")[0]
        opens = {"chat": self.opens, "calls": self.call_opens, "thoughts": self.thought_opens}[name]
        return Rendering(re.sub("[«»]", "", text), taught, re.sub("[«»]", "", before) + opens)


PLACEHOLDERS = {
    "$TOOL": json.dumps(TOOL),
    "$FUNCTION": json.dumps(TOOL["function"]),
    "$INDENTED_TOOL": json.dumps(TOOL, indent=4),
    "$INDENTED_FUNCTION": json.dumps(TOOL["function"], indent=4),
}


def call_chat(arguments: Any, content: str | None = "", call_id: str = "call00001") -> Chat:
    function = {"name": "lookup", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": call_id, "name": "lookup"},
        {"role": "assistant", "content": "Sunny."},
    ]


def _family(path: Path) -> Family:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in rows.items()}
    return Family(name=path.stem, **fields)


FAMILIES = {path.stem: _family(path) for path in sorted(FOLDER.glob("*.toml"))}


@cache
def tokenizer(name: str) -> Any:
    """Build the tokenizer of a family: one token a byte, and the family's own tokens."""
    from tokenizers import AddedToken, processors

    from slimectl.checkpoints.create import byte_tokenizer

    family = FAMILIES[name]
    specials = [*family.special, *family.stops, family.eos, family.bos, family.earlier_end]
    built = byte_tokenizer(list(dict.fromkeys(filter(None, specials))))
    built.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    built.chat_template, built.eos_token, built.pad_token = family.template, family.eos, family.eos
    if family.bos:
        built.bos_token = family.bos
    if family.adds_bos:
        built.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="$bos $A".replace("$bos", family.bos), special_tokens=[(family.bos, built.bos_token_id)]
        )
    return built


def rendered(name: str, chat: Chat, *, tools: bool = False, header: bool = False, **kwargs: Any) -> str:
    """Render a chat by transformers' Jinja environment, without what its tokenizers do to messages in some versions."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    values = {"messages": chat, "tools": [TOOL] if tools else None, "add_generation_prompt": header}
    dates = {"strftime_now": DAY.strftime} if FAMILIES[name].date else {}
    template = _compile_jinja_template(FAMILIES[name].template)
    return str(template.render(**tokenizer(name).special_tokens_map, **values, **dates, **kwargs))


def build_model(name: str, folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """Write a tiny model of random weights with the tokenizer of a family and its end tokens into `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, text = FAMILIES[name], tokenizer(name)
    ids = [text.convert_tokens_to_ids(token) for token in dict.fromkeys((family.eos, *family.stops))]
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "vocab_size": len(text),
        "bos_token_id": text.bos_token_id,
        "eos_token_id": ids[0],
        "pad_token_id": ids[0],
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **shape | dict(config or {})), dtype=torch.float32
        )
    model.generation_config.eos_token_id = ids
    model.save_pretrained(folder)
    text.save_pretrained(folder)
    return folder


def table() -> str:
    """Return the table of the families for docs/chat-templates.md."""
    head = ["family", "models", "end of a turn", "the engine stops at", "arguments of calls", "reasoning", "developer"]
    rows = [head, ["---"] * len(head)]
    for family in FAMILIES.values():
        rows.append(
            [
                family.name,
                family.models,
                ", ".join(code(end) for end in ends(family)) or "none",
                ", ".join(code(stop) for stop in family.stops),
                family.arguments or "none shown",
                reasoning_cell(family),
                family.developer,
            ]
        )
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    notes = "\n".join(f"- **{family.name}**: {family.notes}" for family in FAMILIES.values() if family.notes)
    return f"{lines}\n\n{notes}\n"


def code(token: str) -> str:
    return "`" + token.replace("|", "\\|") + "`"


def ends(family: Family) -> list[str]:
    """The tokens with which taught turns end, in the order of `stops`."""
    taught = [span for name in ("chat", "calls") if getattr(family, name) for span in family.rendering(name).taught]
    return [token for token in dict.fromkeys(family.stops) if any(span.endswith(token) for span in taught)]


def reasoning_cell(family: Family) -> str:
    if family.reasoning:
        tags = ", `</think>`" if family.think_tags == "read" else ""
        return f"`{family.reasoning}`{tags}, earlier turns {family.earlier}"
    return {"text": "none", "dropped": "lost before `</think>`", "read": f"`</think>`, earlier turns {family.earlier}"}[
        family.think_tags
    ]
