"""Grammars over bytes that restrict the next token.

A grammar consists of byte sets, sequences, alternatives, repetitions and rules. A state of its automaton is the set of
all possible continuations of the text so far, each a stack of nodes. States and transitions are computed on first use
and cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slimectl.data.token_bytes import TokenBytes
from slimectl.errors import SettingsError


@dataclass(frozen=True, eq=False)
class Bytes:
    """One byte of a set."""

    values: frozenset[int]


@dataclass(frozen=True, eq=False)
class Sequential:
    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    """One of several nodes. With `takes_plain` every plain character (see `_is_plain`) is an option."""

    options: tuple[Node, ...]
    takes_plain: bool = False


@dataclass(frozen=True)
class Repeat:
    """`low` to `high` repetitions of a node that matches at least one byte. None means unbounded."""

    node: Node
    low: int = 0
    high: int | None = None


@dataclass(eq=False)
class Rule:
    """A node that is defined later, so that grammars can be recursive."""

    node: Node = field(default_factory=lambda: Sequential(()))


Node = Bytes | Sequential | Choice | Repeat | Rule
EMPTY: Sequential = Sequential(())

Stack = tuple[Node, "Stack"] | None
"""The nodes that must follow, the next one first. None is the end of the text."""

State = frozenset[Stack]
"""Stacks whose first node is a byte set, or that are at the end."""

DEAD = -1
"""Number of the state in which the text does not match the grammar."""


PLAIN_ASCII = frozenset(range(0x20, 0x80)) - frozenset(b'"\\')
"""ASCII characters that need no escape in a JSON string."""


def has_text(grammar: Node) -> bool:
    """Whether a grammar matches any finite text. Rules that require each other match none."""
    reached: dict[int, tuple[Node, Sequence[Node]]] = {}
    pending = [grammar]
    while pending:
        node = pending.pop()
        if id(node) not in reached:
            reached[id(node)] = node, (parts := _parts(node))
            pending += parts
    ending, count = set[int](), -1
    while count < len(ending):
        count = len(ending)
        for number, (node, parts) in reversed(reached.items()):
            ends = any if isinstance(node, Choice) else all
            if ends(id(part) in ending for part in parts) or (isinstance(node, Repeat) and not node.low):
                ending.add(number)
    return id(grammar) in ending


def _parts(node: Node) -> Sequence[Node]:
    if isinstance(node, Repeat | Rule):
        return (node.node,)
    return () if isinstance(node, Bytes) else node.options if isinstance(node, Choice) else node.parts


def literal(text: str) -> Node:
    return Sequential(tuple(Bytes(frozenset((byte,))) for byte in text.encode()))


def ranges(*pairs: tuple[int, int]) -> Bytes:
    return Bytes(frozenset(byte for low, high in pairs for byte in range(low, high + 1)))


def series(*parts: Node | str) -> Node:
    return Sequential(tuple(literal(part) if isinstance(part, str) else part for part in parts))


def optional(node: Node) -> Node:
    return Choice((EMPTY, node))


SPACE = optional(Choice((literal(" "), series("\n", Repeat(Bytes(frozenset(b" \t")), 0, 24)))))
"""Whitespace between two parts: none, a space, or a line break with indentation. Bounded, so that it always ends."""
DIGIT, TAIL = ranges((0x30, 0x39)), ranges((0x80, 0xBF))
HEX = ranges((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))
MULTIBYTE = (
    series(ranges((0xC2, 0xDF)), TAIL),
    series(ranges((0xE0, 0xE0)), ranges((0xA0, 0xBF)), TAIL),
    series(ranges((0xE1, 0xEC), (0xEE, 0xEF)), TAIL, TAIL),
    series(ranges((0xED, 0xED)), ranges((0x80, 0x9F)), TAIL),
    series(ranges((0xF0, 0xF0)), ranges((0x90, 0xBF)), TAIL, TAIL),
    series(ranges((0xF1, 0xF3)), TAIL, TAIL, TAIL),
    series(ranges((0xF4, 0xF4)), ranges((0x80, 0x8F)), TAIL, TAIL),
)
"""Non-ASCII characters in UTF-8."""
CHARACTER = Choice(
    (
        ranges((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F)),
        series("\\", Bytes(frozenset(b'"\\/bfnrt'))),
        series("\\u", ranges((0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66)), HEX, HEX, HEX),
        series("\\u", Bytes(frozenset(b"dD")), ranges((0x30, 0x37)), HEX, HEX),  # half a surrogate pair is not allowed
        *MULTIBYTE,
    ),
    takes_plain=True,
)
"""One character inside a JSON string."""
STRING = series('"', Repeat(CHARACTER), '"')
INTEGER = series(optional(literal("-")), Choice((literal("0"), series(ranges((0x31, 0x39)), Repeat(DIGIT, 0, 19)))))
EXPONENT = series(Bytes(frozenset(b"eE")), optional(Bytes(frozenset(b"+-"))), Repeat(DIGIT, 1, 2))
NUMBER = series(INTEGER, optional(series(".", Repeat(DIGIT, 1, 20))), optional(EXPONENT))


class Automaton:
    """Numbered states of a grammar, computed when they are first reached."""

    def __init__(self, grammar: Node) -> None:
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._steps: list[dict[int, int]] = []
        self.start = self._number(_expanded([(grammar, None)]))

    def accepts(self, state: int) -> bool:
        """Whether the text may end here."""
        return state != DEAD and None in self._states[state]

    def step(self, state: int, byte: int) -> int:
        """Return the state after one more byte, or DEAD if no text of the grammar has it here."""
        following = self._steps[state].get(byte)
        if following is None:
            stacks = [
                stack[1]
                for stack in self._states[state]
                if stack is not None and isinstance(stack[0], Bytes) and byte in stack[0].values
            ]
            following = self._steps[state][byte] = self._number(_expanded(stacks)) if stacks else DEAD
        return following

    def plain_length(self, state: int) -> float:
        """Return how many arbitrary plain characters may follow: infinity in an unbounded repetition."""
        return max(map(_plain_length, self._states[state]), default=0)

    def _number(self, state: State) -> int:
        if state not in self._numbers:
            self._numbers[state] = len(self._states)
            self._states.append(state)
            self._steps.append({})
        return self._numbers[state]


def _plain_length(stack: Stack) -> float:
    """Return how many plain characters a stack accepts if it is inside a repetition of them, else 0."""
    if stack is None or stack[1] is None:
        return 0
    first, repeat = stack[0], stack[1][0]
    if not isinstance(repeat, Repeat) or not isinstance(repeat.node, Choice) or not repeat.node.takes_plain:
        return 0
    # Inside an escape or a character of several bytes, `first` is a later part of an option.
    more = math.inf if repeat.high is None else repeat.high
    return 1 + more if first in repeat.node.options else 0


def _expanded(stacks: Iterable[Stack]) -> State:
    """Expand the first node of each stack until all are byte sets."""
    pending, seen, expanded = list(stacks), set[Stack](), set[Stack]()
    while pending:
        stack = pending.pop()
        if stack in seen:  # also a rule that refers to itself
            continue
        seen.add(stack)
        if stack is None:
            expanded.add(stack)
            continue
        node, following = stack
        if isinstance(node, Bytes):
            expanded.add(stack)
        elif isinstance(node, Rule):
            pending.append((node.node, following))
        elif isinstance(node, Choice):
            pending += [(option, following) for option in node.options]
        elif isinstance(node, Repeat):
            pending += _repeated(node, following)
        else:
            for part in reversed(node.parts):
                following = (part, following)
            pending.append(following)
    return frozenset(expanded)


def _repeated(node: Repeat, following: Stack) -> list[Stack]:
    stacks = [] if node.low else [following]
    if node.high != 0:
        remaining = Repeat(node.node, max(0, node.low - 1), None if node.high is None else node.high - 1)
        stacks.append((node.node, (remaining, following)))
    return stacks


class TokenList:
    """Tokens sorted by their bytes, with the length of the prefix that each shares with the one before it."""

    def __init__(self, tokens: Iterable[tuple[bytes, int]]) -> None:
        self._tokens = sorted(tokens)
        texts = [text for text, _ in self._tokens]
        self._shared = [0, *map(_shared, texts, texts[1:])]

    def allowed(self, automaton: Automaton, state: int) -> list[int]:
        """Return the tokens that may follow. Each shared prefix is walked only once."""
        tokens, shared, step = self._tokens, self._shared, automaton.step
        allowed: list[int] = []
        states, i = [state], 0
        while i < len(tokens):
            text, token = tokens[i]
            del states[shared[i] + 1 :]
            for byte in text[len(states) - 1 :]:
                following = step(states[-1], byte)
                if following == DEAD:
                    break
                states.append(following)
            i += 1
            if len(states) == len(text) + 1:
                allowed.append(token)
            else:
                while i < len(tokens) and shared[i] >= len(states):
                    i += 1
        return allowed


class Vocabulary:
    """The tokens of a model as bytes, without special ones."""

    def __init__(self, tokens: TokenBytes, *, size: int, device: torch.device) -> None:
        self.bytes, self.size, self.device = tokens, size, device
        self.texts = {token: tokens.of(token) for token in range(size) if not tokens.is_special(token)}
        self._pairs = [(text, token) for token, text in self.texts.items() if text]
        self._plain_lengths = {token: len(text.decode()) for text, token in self._pairs if _is_plain(text)}
        self._longest = max(self._plain_lengths.values(), default=0)
        self._parts: dict[float, tuple[list[int], TokenList]] = {}

    def split(self, length: float) -> tuple[list[int], TokenList]:
        """Return the plain tokens of at most `length` characters, and all other tokens."""
        length = min(length, self._longest)
        if length not in self._parts:
            plain = {token for token, count in self._plain_lengths.items() if count <= length}
            others = TokenList(pair for pair in self._pairs if pair[1] not in plain)
            self._parts[length] = sorted(plain), others
        return self._parts[length]


def _is_plain(text: bytes) -> bool:
    """Whether a text consists of whole characters, none of them quotes, backslashes or control characters."""
    if any(byte < 0x80 and byte not in PLAIN_ASCII for byte in text):
        return False
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def token_table(tokenizer: Any, *, size: int, device: torch.device) -> Vocabulary:
    """Return the vocabulary of a tokenizer. Raises SettingsError if its tokens cannot spell every JSON text."""
    vocabulary = Vocabulary(TokenBytes(tokenizer), size=size, device=device)
    missing = {chr(byte) for byte in range(0x20, 0x7F)} - {text.decode("latin-1") for text in vocabulary.texts.values()}
    if missing:
        raise SettingsError(
            f"grammar: the tokenizer has no token for the character {min(missing)!a}, so grammars are not supported"
        )
    return vocabulary


def _shared(first: bytes, second: bytes) -> int:
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)


MOST_MASKS = 256
"""Maximum number of masks that a grammar caches. A mask takes one byte per token."""


class TokenGrammar:
    """A grammar over the tokens of a vocabulary. Caches the masks of recent states."""

    def __init__(self, grammar: Node, vocabulary: Vocabulary) -> None:
        self.automaton = Automaton(grammar)
        self.vocabulary = vocabulary
        self._masks: dict[int, tuple[Tensor, int]] = {}

    def state(self, end_tokens: Sequence[int]) -> GrammarState:
        """Return the state at the start of a response that ends with one of `end_tokens`."""
        return GrammarState(self, end_tokens)

    def mask_V(self, state: int) -> tuple[Tensor, int]:
        """Return which tokens may follow [V], without end tokens, and their number."""
        if state not in self._masks:
            while len(self._masks) >= MOST_MASKS:
                del self._masks[next(iter(self._masks))]
            mask_V = torch.zeros(self.vocabulary.size, dtype=torch.bool)
            mask_V[torch.tensor(self._allowed(state), dtype=torch.long)] = True
            self._masks[state] = mask_V.to(self.vocabulary.device), int(mask_V.sum())
        return self._masks[state]

    def _allowed(self, state: int) -> list[int]:
        # Inside a free string, most tokens need no walk.
        plain, others = self.vocabulary.split(self.automaton.plain_length(state))
        return [*plain, *others.allowed(self.automaton, state)]


class GrammarState:
    """The position of one response in a grammar."""

    def __init__(self, grammar: TokenGrammar, end_tokens: Sequence[int]) -> None:
        self._grammar = grammar
        self._ends = list(end_tokens)
        self._state = grammar.automaton.start

    def advance(self, token: int) -> None:
        """Advance by one token. An end token changes nothing."""
        for byte in b"" if token in self._ends else self._grammar.vocabulary.bytes.of(token):
            self._state = DEAD if self._state == DEAD else self._grammar.automaton.step(self._state, byte)

    @property
    def is_over(self) -> bool:
        """Whether only an end token may follow."""
        return self._mask_V()[1] == 0

    @property
    def is_forced(self) -> bool:
        """Whether only one token may follow, so that the policy has no choice."""
        _, count = self._mask_V()
        return count == 1 if count and not self._may_end else int(self.mask_V().sum()) == 1

    @property
    def _may_end(self) -> bool:
        return self._grammar.automaton.accepts(self._state)

    def _mask_V(self) -> tuple[Tensor, int]:
        """Return which tokens may follow [V], without end tokens, and their number."""
        vocabulary = self._grammar.vocabulary
        if self._state == DEAD:
            return torch.zeros(vocabulary.size, dtype=torch.bool, device=vocabulary.device), 0
        return self._grammar.mask_V(self._state)

    def mask_V(self) -> Tensor:
        """Return which tokens may follow [V].

        Includes end tokens if the text may end here or nothing else may follow.
        """
        mask_V, count = self._mask_V()
        if self._may_end or not count:
            mask_V = mask_V.clone()
            mask_V[self._ends] = True
        return mask_V


class TokenSet:
    """A restriction to the same tokens at every position, with the interface of a grammar and of its states."""

    is_over = False

    def __init__(self, tokens: Sequence[int], *, size: int, device: torch.device) -> None:
        self._mask_V = torch.zeros(size, dtype=torch.bool)
        self._mask_V[list(tokens)] = True
        self.is_forced = int(self._mask_V.sum()) == 1
        self._mask_V = self._mask_V.to(device)

    def state(self, end_tokens: Sequence[int]) -> TokenSet:
        """Return itself. An end token is allowed only if it is one of the tokens."""
        return self

    def advance(self, token: int) -> None:
        """Do nothing: the allowed tokens never change."""

    def mask_V(self) -> Tensor:
        """Return which tokens may follow [V]."""
        return self._mask_V
