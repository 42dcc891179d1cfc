"""An agent of your own: it checks the answer, and gives the model a second try.

slimectl run -s rollout.custom_generate_function_path=agent.py:generate
python agent.py        # one attempt of an untrained model
"""

from __future__ import annotations

from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

from slimectl import Prompt, Sample, create_model, load_settings, rollout
from slimectl.data.chat import Conversation, Generate
from slimectl.types import SamplingParams


async def generate(sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any) -> Sample:
    """Run one attempt: ask, check the answer, and ask once more if it is wrong.

    `conversation.ask()` returns the model's text, or None if there is no room for another turn. Call your tools here,
    and give their results to `conversation.tell`. The model is not trained on what you tell it. `sample.reward` is the
    reward of the attempt. Leave it unset to have a verifier or a reward function grade the response.
    """
    conversation = Conversation(sample, tokenizer, generate, sampling_params, max_turns=2)
    sample.reward = 0.0
    answer = await conversation.ask()
    if answer is not None and answer.strip() == str(sample.label):
        sample.reward = 1.0
    elif answer is not None:
        conversation.tell_text(" That is wrong. Again: ")
        answer = await conversation.ask()
        if answer is not None and answer.strip() == str(sample.label):
            sample.reward = 0.5
    return sample


def main() -> Sample:
    """Run one attempt of a new model, print who wrote what, and return it."""
    with TemporaryDirectory() as folder:
        values = {
            "model.path": str(create_model("tiny", f"{folder}/model")),
            "rollout.custom_generate_function_path": f"{__file__}:generate",
            "rollout.n_samples_per_prompt": 1,
            "rollout.max_response_len": 128,
            "rollout.apply_chat_template": False,
        }
        prompt = Prompt("Which is larger, 3 or 7?", label="7")
        [sample] = islice(rollout([prompt], load_settings(values=values)), 1)
    agent_tokens = sample.loss_mask.count(0) if sample.loss_mask else 0
    print(f"{sample.response_length} tokens, {agent_tokens} of them the agent's: {sample.response!r}")
    return sample


if __name__ == "__main__":
    main()
