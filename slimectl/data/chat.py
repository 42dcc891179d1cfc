"""Renders chats to tokens: prompts, and the messages between turns of the model. Also the multi-turn Conversation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slimectl.chats.template import Template
from slimectl.data.growing_text import response_text
from slimectl.data.images import tokenizer_processor
from slimectl.data.prompt_images import has_images
from slimectl.errors import RecordError
from slimectl.settings.rollout import RolloutSettings
from slimectl.system.stdio import logger
from slimectl.types import Chat, Completion, Prompt, Sample, SamplingParams, Status

# Two texts with nothing in common, so that renderings with each of them differ exactly where the message is.
STAND_INS = ("x", "y")


def render(
    prompt: Prompt,
    tokenizer: Any,
    *,
    apply_chat_template: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    header: bool | None = None,
) -> list[int]:
    """Render a prompt to the tokens that the model continues.

    A string is tokenized with the BOS token that its tokenizer adds, or as one user message with `apply_chat_template`.
    A chat list always goes through the tokenizer's template, with its tools and the header of the assistant's turn. If
    the chat ends with an assistant message, the model continues that message. If `header` is given, all messages are
    complete, and it decides whether the header of the next turn follows. Raises SettingsError if the tokenizer has no
    template, and RecordError if the template rejects the chat or leaves out a part of it.
    """
    with located(prompt):
        if isinstance(prompt.text, str) and not apply_chat_template:
            return encode_raw(tokenizer, prompt.text)
        template = Template(tokenizer, prompt, template_kwargs)
        chat = as_chat(prompt.text)
        text = template.prompt_text(chat) if header is None else template.text(template.fit(chat), header=header)
        tokens = encode(tokenizer, text)
        if not prompt.images and not has_images(prompt.text):
            return tokens
        return repeated(tokens, image_repeats(tokens, prompt, tokenizer))


def image_repeats(tokens: list[int], prompt: Prompt, tokenizer: Any) -> list[int]:
    """Return how often each token of a rendered chat occurs in the model's input. Image placeholders are repeated."""
    return tokenizer_processor(tokenizer).repeats(tokens, prompt.images)


def repeated(values: list[int], counts: list[int]) -> list[int]:
    """Return each value repeated by its count."""
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]


_warned: set[str] = set()
"""Tokenizers for which a warning about a string prompt was logged."""


def warn_of_raw_prompt(prompt: Prompt, tokenizer: Any, settings: RolloutSettings) -> None:
    """Warn once about a string prompt that bypasses the chat template, unless the settings decide it."""
    decided = settings.apply_chat_template or "apply_chat_template" in settings.model_fields_set
    if decided or not isinstance(prompt.text, str) or not prompt.text or not getattr(tokenizer, "chat_template", None):
        return
    name = str(getattr(tokenizer, "name_or_path", ""))
    if name not in _warned:
        _warned.add(name)
        logger.warning(
            f"{prompt.source_location or 'prompt'}: string prompts are sent without the chat template. Set "
            f"-s rollout.apply_chat_template=true to send them as user messages, or =false to silence this warning."
        )


@contextmanager
def located(prompt: Prompt) -> Iterator[None]:
    """Prefix a RecordError raised inside with the source location of the prompt."""
    try:
        yield
    except RecordError as error:
        if not prompt.source_location:
            raise
        raise RecordError(f"{prompt.source_location}: {error}") from error


def following(
    tokenizer: Any,
    messages: Chat,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    answer: Mapping[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Render `messages` that follow an assistant turn, up to the header of the next assistant turn.

    The tokens begin with the end of the assistant's turn. Earlier tokens are not rendered again, so sampled tokens stay
    unchanged: only the difference is rendered, after placeholder texts for a user and an answer. Some templates accept
    a tool result only after its call. For them `answer` is the message with the calls. Raises SettingsError without a
    template, and RecordError if the template rejects such messages.
    """
    template = Template(tokenizer, Prompt(text="", tools=tools or None), template_kwargs)
    question = [{"role": "user", "content": STAND_INS[0]}]
    plain = [[*question, {"role": "assistant", "content": text}] for text in STAND_INS]
    calls = (answer or {}).get("tool_calls")
    try:
        first, second = (template.text(template.fit([*chat, *messages]), header=True) for chat in plain)
        return encode(tokenizer, shared(first[::-1], second[::-1])[::-1])
    except RecordError:
        if not calls:
            raise
    ends = [template.text(template.fit(chat))[::-1] for chat in plain]
    called = template.fit([*question, {"role": "assistant", "content": "", "tool_calls": calls}, *messages])
    before, rendered = template.text(called[:2]), template.text(called, header=True)
    if not rendered.startswith(before):
        raise RecordError("the chat template changes a tool call once its result follows")
    return encode(tokenizer, shared(*ends)[::-1] + rendered[len(before) :])


def shared(a: str, b: str) -> str:
    """Return the longest common prefix."""
    end = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:end]


def as_chat(text: str | Chat) -> Chat:
    return [{"role": "user", "content": text}] if isinstance(text, str) else text


def encode_raw(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a text that is not a rendered chat, preceded once by the tokens that the tokenizer adds before texts."""
    tokens, letter, with_specials = encode(tokenizer, text), encode(tokenizer, "a"), tokenizer.encode("a")
    count = next((i for i in range(len(with_specials)) if with_specials[i : i + len(letter)] == letter), 0)
    prefix = with_specials[:count]
    return tokens if tokens[:count] == prefix else [*prefix, *tokens]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokenize a rendered chat, or a text in the middle of one, without adding special tokens. Raises RecordError."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RecordError(
                f"prompt: half of a surrogate pair at character {error.start + 1}. Tokenizers accept whole characters "
                f"only."
            ) from None
    return list(tokenizer.encode(text, add_special_tokens=False))


Generate = Callable[[list[int], SamplingParams], Awaitable[Completion]]

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}

BROKEN_OFF = "broken_off"
"""Metadata key of an interrupted turn. The value is [number of turns before it, its text so far, entries of turns]."""


class Conversation:
    """One sample as a multi-turn conversation of the policy with tools, a user or an environment.

    `ask` generates the policy's turn, and `tell` adds messages of other roles. The policy's tokens are kept as sampled
    and trained on (mask 1). All others get mask 0. `sampling_params.max_tokens` limits the whole response, other
    messages included. When it is used up, or generation is aborted, `over` is true and `ask` returns None.

    An interrupted turn (rollout.partial_rollout) resumes where it stopped, and `ask` then returns its complete text.
    """

    def __init__(
        self,
        sample: Sample,
        tokenizer: Any,
        generate: Generate,
        sampling_params: SamplingParams,
        *,
        max_turns: int = 8,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.sample = sample
        self.max_turns = max_turns
        # Progress of an interrupted sample: number of turns, and the text of its last turn so far.
        turns, text, *entries = sample.metadata.pop(BROKEN_OFF, (0, ""))
        self.turns: int = turns
        self._turn_text: str = text
        self._entries: list[dict[str, Any]] = entries[0] if entries else []
        if sample.turn_rewards is not None:
            sample.turn_rewards = self._entries
        self.over = False
        self._tokenizer = tokenizer
        self._generate = generate
        self._params = sampling_params
        self._template_kwargs = template_kwargs

    async def ask(self) -> str | None:
        """Generate the policy's next turn. Return its text without the end token, None if tokens or turns run out."""
        remaining = self._params.max_tokens - self.sample.response_length
        if self.over or remaining <= 0 or self.turns == self.max_turns:
            self._end(Status.TRUNCATED)
            return None
        min_tokens = min(self._params.min_tokens, remaining)
        params = dataclasses.replace(self._params, max_tokens=remaining, min_tokens=min_tokens)
        if self.turns and params.seed is not None:
            params = dataclasses.replace(params, seed=(params.seed + self.turns) % (1 << 63))
        answer = await self._generate(self.sample.tokens, params)
        if len(self._entries) <= self.turns:  # an interrupted turn has one already
            self._entries.append({"start": self.sample.response_length, "end": 0, "reward": 0.0})
        self.sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
        self._entries[-1]["end"] = self.sample.response_length
        self.sample.status = FINISHED[answer.finish_reason]
        self.over = answer.finish_reason != "stop"
        text, self._turn_text = self._turn_text + answer.text, ""
        if answer.finish_reason == "abort":
            self.sample.metadata[BROKEN_OFF] = [self.turns, text, self._entries]
            return None
        self.turns += 1
        return text

    def reward(self, reward: float, *, state: str | None = None) -> None:
        """Reward the policy's last turn, which was taken in `state` (a key that equal states share).

        Turns without a reward get 0. The reward of the whole attempt is a separate number, `sample.reward`.
        """
        if not self._entries:
            raise ValueError("the policy has not taken a turn that could be rewarded. Call ask() first")
        self._entries[-1] |= {"reward": float(reward)} | ({"state": state} if state is not None else {})
        self.sample.turn_rewards = self._entries

    def tell(self, *messages: dict[str, Any]) -> None:
        """Add chat messages of other roles, rendered by the template, with the header of the next turn.

        If the response keeps special tokens (rollout.skip_special_tokens), the template's special tokens are added too.
        """
        cleaned = [{name: _replace_surrogates(value) for name, value in message.items()} for message in messages]
        self._add(following(self._tokenizer, cleaned, self._template_kwargs), strip_end=True)

    def tell_text(self, text: str) -> None:
        """Add plain text, for models without a chat template."""
        self._add(list(self._tokenizer.encode(_replace_surrogates(text), add_special_tokens=False)), strip_end=False)

    def _add(self, tokens: list[int], *, strip_end: bool) -> None:
        if self.over:
            return
        previous_tokens = self.sample.tokens
        text = response_text(self._tokenizer.decode, tokens, keep_special=not self._params.skip_special_tokens)
        # The template ends the policy's turn. If the policy sampled the end token itself, that one is kept instead.
        if strip_end and tokens and self.sample.response_length and previous_tokens[-1] == tokens[0]:
            tokens = tokens[1:]
        if self.sample.response_length + len(tokens) >= self._params.max_tokens:
            self._end(Status.TRUNCATED)
            return
        self.sample.append_response_tokens(tokens, trainable=False, text=text)

    @contextmanager
    def tool(self) -> Iterator[None]:
        """Add the time spent inside to `sample.non_generation_time`, in seconds."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.sample.non_generation_time += time.perf_counter() - started

    def _end(self, status: Status) -> None:
        if not self.over:
            self.sample.status = status
        self.over = True


def _replace_surrogates(value: Any) -> Any:
    """Replace halves of surrogate pairs, which tokenizers reject."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def chat_of(sample: Sample) -> Chat:
    """Return the prompt of a sample as a chat."""
    return [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else sample.prompt
