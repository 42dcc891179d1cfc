"""An agent of your own: it checks the answer, and gives the model a second try.

slimectl run … -s rollout.custom_generate_function_path=examples/custom_agent.py:generate
python examples/custom_agent.py        # one attempt of an untrained model
"""

from __future__ import annotations

from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

from slimectl import Prompt, Sample, create_model, load_settings, rollout
from slimectl.data.chat import Conversation, Generate
from slimectl.types import SamplingParams


async def generate(sample: Sample, sampling_params: SamplingParams, generate: Generate, tokenizer: Any) -> Sample:
    """Ask; if the answer lacks the label, say so and ask once more. What the agent says is not trained on."""
    conversation = Conversation(sample, tokenizer, generate, sampling_params, max_turns=2)
    answer = await conversation.ask()
    if answer is not None and str(sample.label) not in answer:
        conversation.tell_text(" That is wrong. Again: ")
        await conversation.ask()
    return sample


def main() -> Sample:
    """Run one attempt of a new model, print who wrote what, and return it."""
    with TemporaryDirectory() as folder:
        values = {
            "model.path": str(create_model("tiny", f"{folder}/model")),
            "rollout.custom_generate_function_path": f"{__file__}:generate",
            "rollout.n_samples_per_prompt": 1,
            "rollout.max_response_len": 128,
            "rollout.apply_chat_template": False,  # "1 + 1 = " is a text to be continued
        }
        [sample] = islice(rollout([Prompt("1 + 1 = ", label="2")], load_settings(values=values)), 1)
    agent_tokens = sample.loss_mask.count(0) if sample.loss_mask else 0
    print(f"{sample.response_length} tokens, {agent_tokens} of them the agent's: {sample.response!r}")
    return sample


if __name__ == "__main__":
    main()
