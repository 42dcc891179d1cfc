"""An OpenEnv server: guess a number below 10 in five steps."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Hint(Observation):
    message: str = ""


class GuessingGame(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.count = random.Random(seed).randrange(10), 0
        return Hint(message="a number below 10?")

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        if action.guess == self.number:
            return Hint(message="right", done=True, reward=1.0)
        return Hint(message="more" if action.guess < self.number else "less", done=self.count == 5, reward=-0.1)

    @property
    def state(self):
        return State(step_count=self.count)


if __name__ == "__main__":
    app = create_fastapi_app(GuessingGame, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
