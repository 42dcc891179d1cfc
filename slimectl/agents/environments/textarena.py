"""TextArena games: the policy plays every player, each in its own chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slimectl.agents.environments.port import Action, Environment, Observation, Task

MOST_PLAYERS = 15


class TextArena(Environment):
    """A game of `textarena.make(ID, **arguments)`. Its tasks are seeds.

    Action wrappers apply. Observation wrappers do not, because they repeat the whole game at every turn, and the chat
    already has it. `num_players` is the number of players, by default the fewest that the game allows.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        import textarena

        arguments = dict(arguments)
        players = arguments.pop("num_players", None)
        self._action_type = textarena.ObservationType.PLAYER_ACTION
        self._make: Callable[[], Any] = lambda: textarena.make(target, **arguments)
        self._env = self._make()
        self._players = int(players) if players is not None else self._fewest_players()
        self._env = self._make()

    def _fewest_players(self) -> int:
        """Return the fewest players with which the game starts. Games may refuse with any exception."""
        problem: Exception | None = None
        for players in range(1, MOST_PLAYERS + 1):
            try:
                self._make().reset(num_players=players, seed=0)
            except Exception as error:
                problem = problem or error
            else:
                return players
        assert problem is not None
        raise problem

    def reset(self, task: Task) -> Observation:
        self._env.reset(num_players=self._players, seed=task.seed)
        return self._observation()

    def step(self, action: Action) -> Observation:
        is_done, _ = self._env.step(action=action.text)
        return self._ending() if is_done else self._observation(is_error=self._is_refused())

    def close(self) -> Observation:
        return self._ending()

    def _observation(self, *, is_error: bool = False) -> Observation:
        """Return what the next player has not read yet, without the player's own moves, which are in the chat."""
        base = self._env
        while hasattr(base, "env"):
            base = base.env
        player, messages = base.get_observation()
        roles = base.state.role_mapping
        lines = [
            f"[{roles.get(sender, f'Player {sender}')}] {text}" if kind is self._action_type else text
            for sender, text, kind in messages
            if not (kind is self._action_type and sender == player)
        ]
        return Observation([{"role": "user", "content": "\n".join(lines)}], player=player, is_error=is_error)

    def _ending(self) -> Observation:
        rewards, players = self._env.close()
        infos = list((players or {}).values())
        reasons = [reason for player in infos if (reason := player.get("reason"))]
        final = dict.fromkeys(range(self._players), 0.0)
        final |= {int(player): float(reward) for player, reward in (rewards or {}).items()}
        is_error = any(player.get("invalid_move") for player in infos)
        info = {"reason": reasons[0]} if reasons else {}
        return Observation(rewards=final, is_done=True, is_error=is_error, info=info)

    def _is_refused(self) -> bool:
        """Return whether the last move was refused, if the game's state counts that."""
        return bool(getattr(self._env.state, "error_count", 0))
