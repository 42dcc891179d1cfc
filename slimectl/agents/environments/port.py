"""Interface of environments. One is loaded once, and each episode is a copy of it that is reset, stepped and closed.

Adapters and their process (host.py) import only this file, the standard library and their own package. So an
environment can run in another Python than slimectl.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

Messages = list[dict[str, Any]]
"""Messages of a chat in OpenAI's form."""

EVALUATION_SEEDS = 1_000_000_000
"""First seed of the split `eval`. The seeds of `train` start at 0."""
LONGEST_STATE = 32
"""Characters of a state that are kept. A longer one is identified by its hash."""


@dataclass(frozen=True, slots=True)
class Task:
    """The start of an episode: a task of the environment by number and split, or a row of the user's data."""

    index: int | None = None
    split: str = "train"
    messages: Messages = field(default_factory=list)
    """The row's prompt as a chat."""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """Seed of a task that is defined by its seed."""
        return (self.index or 0) + (EVALUATION_SEEDS if self.split == "eval" else 0)


@dataclass(frozen=True, slots=True)
class Action:
    """An answer of the policy, divided into its parts. `text` is its content without reasoning and calls."""

    text: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls as {"id", "name", "arguments"}, with the arguments as a string that should be a JSON object."""
    player: int = 0
    is_cut: bool = False
    """Whether the answer ended at the token limit."""
    raw: str = ""
    """The whole answer as it was sampled."""


@dataclass(slots=True)
class Observation:
    """Output of an environment: messages for the policy, rewards of the last action, and whether the episode is over.

    With `replaces_chat` the messages are the whole chat. Otherwise they follow the player's last answer.
    """

    messages: Messages = field(default_factory=list)
    rewards: dict[int, Any] = field(default_factory=dict)
    """Rewards by player: numbers, which are kept for each turn and summed, or an object at the end."""
    is_done: bool = False
    is_error: bool = False
    """Whether the last action was invalid. The environment has reported this to the policy and continues."""
    player: int = 0
    """The player whose turn it is."""
    tools: Messages = field(default_factory=list)
    replaces_chat: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """Additional values for the sample's metadata, as JSON."""
    state: str | None = None
    """The state that the policy acts in next, for algorithms that compare actions in equal states. Default: the
    messages, or the state before an invalid action."""

    def state_key(self) -> str:
        """Return the state, shortened to a hash if it is long."""
        text = self.state if self.state is not None else json.dumps(self.messages, sort_keys=True, default=str)
        return text if len(text) <= LONGEST_STATE else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Observation:
        """Return an observation from its JSON form, in which keys are strings."""
        rewards = {int(player): reward for player, reward in values.get("rewards", {}).items()}
        return cls(**{**values, "rewards": rewards})


Result = Observation | Awaitable[Observation]


class Environment:
    """Base class of adapters.

    The constructor loads the environment in the process from which episodes are forked. Anything that it raises is
    reported in one line. The other methods are called in the process of an episode, one after another. They may block,
    since a process that exceeds its deadline is killed, and they may be async.
    """

    tasks: ClassVar[str] = "seeds"
    """Kind of its tasks: "seeds" (any number), "rows" (`count` returns how many), or "data" (rows of the user)."""
    gives_reward: ClassVar[bool] = True
    """Whether it gives rewards. Otherwise a verifier does."""

    warnings: tuple[str, ...] = ()
    """Warnings for the user about a loaded environment, such as tasks that were skipped."""

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def count(self, split: str) -> int:
        """Return the number of tasks of a split, if tasks are rows."""
        return 0

    def reset(self, task: Task) -> Result:
        """Start the episode of a task."""
        raise NotImplementedError

    def step(self, action: Action) -> Result:
        """Apply an answer of the policy."""
        raise NotImplementedError

    def close(self) -> Result:
        """End the episode, finished or not, and return the rewards that are still due."""
        return Observation(is_done=True)
