"""Gymnasium environments: observations as text, actions read from text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slimectl.agents.environments.port import Action, Environment, Observation, Task

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
TAG = re.compile(r"<action>(.*?)</action>", re.DOTALL)
HIGHLIGHT = re.compile(r"\x1b\[(?:\d+;)*4[1-7](?:;\d+)*m(.*?)\x1b\[0m", re.DOTALL)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Gymnasium(Environment):
    """An environment of `gymnasium.make(ID, **arguments)`. Its tasks are seeds, and its return is the reward.

    Arguments of the adapter: `actions` (names of the actions of a Discrete space, in order), `instruction` (text before
    the first observation, by default a description of the actions), `render` (show the drawing of render_mode "ansi"
    below the observation, which is the default if the environment has that mode).
    """

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        import gymnasium

        arguments = dict(arguments)
        self._names: Sequence[str] = [str(name) for name in arguments.pop("actions", ())]
        instruction = arguments.pop("instruction", None)
        render = arguments.pop("render", None)
        self._spaces = gymnasium.spaces
        if render or (render is None and "ansi" in _render_modes(gymnasium, target, arguments)):
            arguments["render_mode"] = "ansi"
        self._env = gymnasium.make(target, **arguments)
        self._renders = arguments.get("render_mode") == "ansi"
        space = self._env.action_space
        if self._names and not (isinstance(space, self._spaces.Discrete) and space.n == len(self._names)):
            raise ValueError(f"actions: {len(self._names)} names for the action space {space}")
        self._instruction = self._form(space) if instruction is None else str(instruction)

    def reset(self, task: Task) -> Observation:
        observation, _ = self._env.reset(seed=task.seed)
        state = self._text(observation)
        text = "\n\n".join(filter(None, (self._instruction, state)))
        return Observation([{"role": "user", "content": text}], state=state)

    def step(self, action: Action) -> Observation:
        value = self._action(action.text)
        if value is None:
            message = {"role": "user", "content": f"This is no valid action. {self._form(self._env.action_space)}"}
            return Observation([message], {0: 0.0}, is_error=True)
        observation, reward, terminated, truncated, _ = self._env.step(value)
        is_done, state = bool(terminated or truncated), self._text(observation)
        message = {"role": "user", "content": state}
        return Observation([message], {0: float(reward)}, is_done=is_done, state=state)

    def close(self) -> Observation:
        self._env.close()
        return Observation(is_done=True)

    def _text(self, observation: Any) -> str:
        text = observation if isinstance(observation, str) else json.dumps(plain(observation))
        return f"{text}\n\n{drawn(str(self._env.render()))}" if self._renders else text

    def _form(self, space: Any) -> str:
        """Return a sentence on how to write an action."""
        if self._names:
            return f"Answer with one action: {', '.join(self._names)}."
        if isinstance(space, self._spaces.Discrete):
            return f"Answer with one action: a number from {space.start} to {space.start + space.n - 1}."
        if isinstance(space, self._spaces.Text):
            return ""
        return f"Answer with one action, as JSON: an element of {space}."

    def _action(self, text: str) -> Any:
        """Return the last action that a text names, or None if it names none."""
        space = self._env.action_space
        if tags := TAG.findall(text):
            text = tags[-1].strip()
        if isinstance(space, self._spaces.Text):
            return text if space.contains(text) else None
        if self._names:
            mentions = [(match.start(), i) for i, name in enumerate(self._names) for match in _words(name, text)]
            return space.start + max(mentions)[1] if mentions else None
        try:
            if isinstance(space, self._spaces.Discrete):
                numbers = NUMBER.findall(text)
                value: Any = space.dtype.type(numbers[-1])
            else:
                value = _like(json.loads(text[min(i for i in (text.find("["), text.find("{")) if i >= 0) :]), space)
        except (ValueError, IndexError, TypeError, KeyError, OverflowError):
            return None
        return value if space.contains(value) else None


def _render_modes(gymnasium: Any, target: str, arguments: Mapping[str, Any]) -> Sequence[str]:
    """Return the render modes of an environment, which are known only for an instance."""
    env = gymnasium.make(target, **arguments)
    modes: Sequence[str] = env.metadata.get("render_modes", ())
    env.close()
    return modes


def drawn(text: str) -> str:
    """Return a drawing without colours. Highlighted text, such as the player's position, is put in brackets.

    >>> drawn("S\\x1b[41mF\\x1b[0mF")
    'S[F]F'
    """
    return COLOURS.sub("", HIGHLIGHT.sub(r"[\1]", text)).strip("\n")


def _words(name: str, text: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"\b{re.escape(name)}\b", text, re.IGNORECASE))


def _like(value: Any, space: Any) -> Any:
    """Return a JSON value as an element of a space: arrays of its type, dicts and tuples of its parts."""
    import numpy

    if isinstance(value, dict):
        return {name: _like(value[name], part) for name, part in space.spaces.items()}
    if hasattr(space, "spaces"):
        return tuple(_like(item, part) for item, part in zip(value, space.spaces, strict=True))
    return numpy.asarray(value, dtype=space.dtype)


def plain(value: Any) -> Any:
    """Return an observation as JSON: arrays as lists, floats to six significant digits.

    >>> plain({"a": (1, 2.00000001)})
    {'a': [1, 2.0]}
    """
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return float(f"{value:.6g}") if isinstance(value, float) else value
