"""Turns of one session as a tree. The policy's output is kept as token ids and never tokenised again.

A request that continues a recorded answer extends that branch. Its prompt is the branch's tokens, followed by the
tokens that the new messages add after an answer. A request that continues no answer, because its history was rewritten
or it comes from another agent, starts a new tree. Two answers to the same messages are siblings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimectl.agents.chat_request import refusing
from slimectl.agents.chat_trie import ChatTrie, KnownChat
from slimectl.chats.requests import ChatRequest
from slimectl.data.chat import encode, encode_raw, following, render
from slimectl.data.growing_text import marked_text, response_text
from slimectl.types import FINISHED, VERSION_SPANS, Completion, Prompt, Sample, Status, detached_copy


@dataclass(slots=True, eq=False)
class Turn:
    """One answer of the policy. `new_tokens` are the tokens of its prompt after the tokens of its parent.

    Tools, `max_tokens` and `stop` are the request's own.
    """

    parent: Turn | None
    new_tokens: list[int]
    completion: Completion
    temperature: float
    messages: list[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    children: int = 0
    reward: float | None = None
    """Reward of this turn alone, if the agent or the environment gave one."""
    state: str | None = None
    """Key of the state in which it was taken."""
    player: int = 0

    def path(self) -> Iterator[Turn]:
        """Yield this turn and its ancestors, the last one first."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent

    def tokens(self) -> list[int]:
        """Return all token ids up to the end of this answer."""
        tokens: list[int] = []
        for turn in reversed(list(self.path())):
            tokens += turn.new_tokens
            tokens += turn.completion.tokens
        return tokens


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt: `tokens` in total, of which `new_tokens` follow the tokens of `parent`. `chat` has its messages."""

    parent: Turn | None
    new_tokens: list[int]
    tokens: list[int]
    chat: KnownChat[Turn] | None = None

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first answer of the branch."""
        turns = list(self.parent.path()) if self.parent is not None else []
        return len(turns[-1].new_tokens) if turns else len(self.tokens)


@dataclass(slots=True)
class TrajectoryTree:
    """All turns of a session, found by the messages that a client sends.

    With `keep_special` the texts of samples have special tokens. The `stop` strings end every response.
    """

    tokenizer: Any
    keep_special: bool = False
    stop: tuple[str, ...] = ()
    turns: list[Turn] = field(default_factory=list)
    _chats: ChatTrie[Turn] = field(default_factory=ChatTrie)
    """Turns by their chat, including the answer."""

    def continuation(self, request: ChatRequest) -> Continuation:
        """Return the prompt of a request, with recorded tokens if it continues an answer. Raises EndpointError."""
        if request.prompt is not None:
            return self._text_continuation(request.prompt)
        chat = self._chats.find(request)
        if beginning := chat.beginning():
            count, parent = beginning
            new_tokens = self._render_following(parent, request, count)
            return Continuation(parent, new_tokens, parent.tokens() + new_tokens, chat)
        prompt = Prompt(text=request.messages, tools=request.tools or None)
        with refusing():
            tokens = render(prompt, self.tokenizer, template_kwargs=request.template_kwargs)
        return Continuation(None, tokens, tokens, chat)

    def _render_following(self, parent: Turn, request: ChatRequest, count: int) -> list[int]:
        """Tokenise the messages after the first `count`, without repeating the end token of the answer."""
        with refusing():
            tokens = following(
                self.tokenizer,
                request.messages[count:],
                request.template_kwargs,
                answer=request.messages[count - 1],
                tools=request.tools,
            )
        sampled = parent.completion.tokens
        return tokens[1:] if tokens and sampled and sampled[-1] == tokens[0] else tokens

    def _text_continuation(self, prompt: str | list[int]) -> Continuation:
        """Return the prompt of a completion. A text continues the longest recorded text that it starts with."""
        if isinstance(prompt, list):
            return Continuation(None, prompt, prompt)
        parent, length = None, 0
        for turn in self.turns:
            text = turn.messages[0].get("text") if turn.messages else None
            if text is not None and len(text) > length and len(text) < len(prompt) and prompt.startswith(text):
                parent, length = turn, len(text)
        with refusing():
            new_tokens = (encode if parent is not None else encode_raw)(self.tokenizer, prompt[length:])
        return Continuation(parent, new_tokens, (parent.tokens() if parent is not None else []) + new_tokens)

    def add(
        self,
        request: ChatRequest,
        continuation: Continuation,
        completion: Completion,
        answer: dict[str, Any],
        temperature: float,
    ) -> Turn:
        """Record an answer. `answer` is the message that the client gets."""
        if isinstance(request.prompt, str):
            messages = [{"text": request.prompt + completion.text}]
        else:
            messages = [*(continuation.chat.messages if continuation.chat is not None else ()), answer]
        turn = Turn(
            continuation.parent,
            continuation.new_tokens,
            completion,
            temperature,
            messages,
            request.tools,
            request.max_tokens,
            request.stop,
        )
        if continuation.parent is not None:
            continuation.parent.children += 1
        self.turns.append(turn)
        if continuation.chat is not None:
            continuation.chat.add(answer, turn)
        return turn

    def samples(self, template: Sample) -> list[Sample]:
        """Return a sample for each branch, starting with the branch of the last response.

        Each sampled token is trained on once. A sample has one temperature, so turns with another temperature than the
        last turn of the branch get loss mask 0. So do tokens that a grammar forced.
        """
        leaves = [turn for turn in self.turns if not turn.children]
        taught: set[int] = set()
        return [self._sample(template, leaf, taught) for leaf in reversed(leaves)]

    def _sample(self, template: Sample, leaf: Turn, taught: set[int]) -> Sample:
        sample = detached_copy(template)
        path = list(reversed(list(leaf.path())))
        root_messages = path[0].messages[:-1]
        sample.tokens, sample.response, sample.response_length = list(path[0].new_tokens), "", 0
        sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = [], [], []
        if root_messages:
            sample.prompt = root_messages
        spans, version_spans = [], []
        for number, turn in enumerate(path):
            if number:
                sample.append_response_tokens(turn.new_tokens, trainable=False, text=self._text(turn.new_tokens))
            answer = turn.completion
            trainable = id(turn) not in taught and turn.temperature == leaf.temperature
            start = sample.response_length
            text = self._answer_text(turn, is_last=turn is leaf)
            sample.append_response_tokens(
                answer.tokens, log_probs=answer.log_probs, text=text, loss_mask=answer.loss_mask
            )
            if trainable:
                taught.add(id(turn))
            else:
                sample.loss_mask[start:] = [0] * len(answer.tokens)
            sample.weight_versions.extend(answer.weight_versions)
            version_spans += answer.version_spans(start)
            spans.append([start, sample.response_length])
        sample.metadata["agent"] = {"turns": spans, **_requests(path)}
        sample.turn_rewards = self._turn_rewards(path, spans)
        if len(set(sample.weight_versions)) > 1:
            sample.metadata[VERSION_SPANS] = version_spans
        sample.status = FINISHED.get(leaf.completion.finish_reason, Status.COMPLETED)
        sample.rollout_temperature = leaf.temperature or 1.0
        return sample

    def _turn_rewards(self, path: Sequence[Turn], spans: Sequence[list[int]]) -> list[dict[str, Any]] | None:
        """Return the rewards of a branch's turns, or None if no turn of the session has one. Missing ones are 0."""
        if all(turn.reward is None for turn in self.turns):
            return None
        numbers: dict[int, int] = {}
        counts: Counter[int] = Counter()
        for turn in self.turns:
            numbers[id(turn)] = counts[turn.player]
            counts[turn.player] += 1
        rewards = []
        for turn, (start, end) in zip(path, spans, strict=True):
            entry: dict[str, Any] = {"start": start, "end": end, "reward": turn.reward or 0.0}
            entry["turn"] = numbers[id(turn)]
            entry |= {"player": turn.player} if turn.player else {}
            rewards.append(entry | ({"state": turn.state} if turn.state is not None else {}))
        return rewards

    def _text(self, tokens: Sequence[int]) -> str:
        return response_text(self.tokenizer.decode, tokens, keep_special=self.keep_special)

    def _answer_text(self, turn: Turn, *, is_last: bool) -> str:
        """Return the text of a response in a sample, without the special token that ends its last turn."""
        answer, stop = turn.completion, (*self.stop, *turn.stop)
        if not self.keep_special:
            return answer.text
        text = response_text(
            self.tokenizer.decode, answer.tokens, keep_special=True, ended=is_last and answer.finish_reason == "stop"
        )
        if stop and answer.text != response_text(self.tokenizer.decode, answer.tokens):
            return marked_text(self.tokenizer.decode, answer.tokens, answer.text, stop)
        return text


def _requests(path: Sequence[Turn]) -> dict[str, Any]:
    """Return what the requests of a branch asked for, and why their answers ended, as one value per turn.

    All requests have the same tools. Tools and limits are omitted if no request has any.
    """
    values: dict[str, Any] = {"finish_reasons": [turn.completion.finish_reason for turn in path]}
    if path[0].tools:
        values["tools"] = list(path[0].tools)
    if any(turn.max_tokens is not None for turn in path):
        values["max_tokens"] = [turn.max_tokens for turn in path]
    if any(turn.stop for turn in path):
        values["stop"] = [list(turn.stop) for turn in path]
    return values
