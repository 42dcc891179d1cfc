"""Functions of slime that do not work here. Each raises an error that suggests a replacement."""

from __future__ import annotations

from typing import Any, NoReturn

from slimectl.errors import HookError

COMMANDS = "Write the agent as a program that takes the policy's address from its environment, and set rollout.agent "
REMEDIES = {
    "abort": "slimectl interrupts responses itself. Set rollout.partial_rollout = true to resume them.",
    "E2BSandbox": f"{COMMANDS}(docs/agents.md). Or install slime alongside slimectl, and set SLIMECTL_SLIME=installed.",
    "eval_rollout": "Call generate_rollout(args, rollout_id, data_source, evaluation=True), with the data source that "
    "your function gets.",
    "generate_rollout": 'slime.rollout.sft_rollout is the algorithm sft. Set algorithm.name = "sft".',
    "reward_func": 'On-policy distillation is an algorithm. Set algorithm.name = "opd" and algorithm.opd_teacher_url.',
}
_SAME = {
    "eval_rollout_single_dataset": "eval_rollout",
    "post_process_rewards": "reward_func",
    "post_process_rewards_cross_vocab": "reward_func",
    "reward_func_cross_vocab": "reward_func",
    **dict.fromkeys(("CLAUDE_CODE", "CODEX", "Sandbox", "ensure_agent_user"), "E2BSandbox"),
}


class AbsentFunction:
    """A function that raises HookError when it is called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise HookError(f"{self.__name__} of slime does not work in slimectl. {REMEDIES[_remedy_of(self.__name__)]}")

    def __getattr__(self, name: str) -> AbsentFunction:
        """Return a method that raises the same error. Python's own attributes are missing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentFunction(self.__name__)


def _remedy_of(name: str) -> str:
    return _SAME.get(name, name)


def __getattr__(name: str) -> AbsentFunction:
    if _remedy_of(name) not in REMEDIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return AbsentFunction(name)
