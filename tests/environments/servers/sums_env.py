"""A verifiers environment: sums, asked for again until the policy is sure; two rewards with weights."""

import verifiers
from datasets import Dataset


class Sums(verifiers.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Are you sure? Say it again."}]

    @verifiers.stop
    async def policy_is_sure(self, state):
        return bool(state["trajectory"]) and "sure" in str(state["trajectory"][-1]["completion"][-1].content)


def exact(completion, answer, **kwargs):
    return float(answer in completion[-1]["content"].split())


def brief(completion, **kwargs):
    return 1.0 / (1 + len(completion))


def load_environment(count=20, max_turns=3):
    rows = [{"question": f"{i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(count)]
    rubric = verifiers.Rubric(funcs=[exact, brief], weights=[1.0, 0.5])
    held_out = Dataset.from_list(rows[:5])
    return Sums(dataset=Dataset.from_list(rows), eval_dataset=held_out, rubric=rubric, max_turns=max_turns)
