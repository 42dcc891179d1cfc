"""Programs as agents in the stages: samples of a rollout, a run that trains on them, and the run's resume."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from agents.sessions import CHATML
from safetensors.torch import load_file
from workshop import Workshop, alike

from slimectl import load_settings
from slimectl.cli.output import up_to_date

pytestmark = pytest.mark.slow

AGENT = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
messages = task["messages"]
for turn in range(2):
    body = json.dumps({"messages": messages, "max_tokens": 6}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
print(sum(letter < "M" for letter in text) / 6)
"""
NO_VERIFIER = ["-s", "score.custom_rm_path=none", "-s", "eval.interval=none", "-s", "rollout.max_response_len=60"]


@pytest.fixture
def agent(workshop: Workshop) -> list[str]:
    """The flag of a program that asks twice, and is its own judge."""
    (workshop.folder / "agent.py").write_text(AGENT)
    return ["--agent", shlex.join([sys.executable, "agent.py"])]


def test_a_rollout_has_a_sample_with_two_turns_for_each_attempt(workshop: Workshop, agent: list[str]):
    output = workshop.slimectl("rollout", "-c", "slimectl.toml", *agent, *NO_VERIFIER, "-n", "1")
    samples = [json.loads(line) for line in output.splitlines()]
    assert len(samples) == 8
    for sample in samples:
        assert [end - start for start, end in sample["metadata"]["agent"]["turns"]] == [6, 6]
        assert (sum(sample["loss_mask"]), 0 <= sample["reward"] <= 1) == (12, True)
    assert len({sample["response"] for sample in samples}) == 8
    example = Path(__file__).parents[2] / "examples" / "command_agent.py"
    words = shlex.join([sys.executable, str(example)])
    output = workshop.slimectl("rollout", "-c", "slimectl.toml", "--agent", words, *NO_VERIFIER, "-n", "1")
    assert {json.loads(line)["reward"] for line in output.splitlines()} == {0.0}


def test_a_run_learns_from_what_its_program_asked_and_goes_on_after_kill_9(workshop: Workshop, agent: list[str]):
    words = ["run", *agent, *NO_VERIFIER, "-s", "run.num_rollout=4"]
    words += ["-s", "rollout.n_samples_per_prompt=2", "-s", "run.rollout_batch_size=2"]
    workshop.slimectl(*words, "--name", "whole")
    process = workshop.start(*words, "--name", "killed")
    metrics = workshop.folder / "runs" / "killed" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("train/grad_norm") < 1:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    workshop.slimectl("run", "--resume", "runs/killed")
    # Programs ask when they are ready, so batches differ, and with them the rounding of log-probabilities.
    alike(workshop.metrics("killed"), workshop.metrics("whole"))
    steps = [line["metrics"] for line in workshop.metrics("whole") if "train/grad_norm" in line["metrics"]]
    assert len(steps) == 4
    assert all(step["train/grad_norm"] > 0 for step in steps)
    agent_metrics = {name: steps[0][f"rollout/agent/{name}"] for name in ("turns", "tool_calls", "failed", "timed_out")}
    assert agent_metrics == {"turns": 2.0, "tool_calls": 0.0, "failed": 0.0, "timed_out": 0.0}


def test_bad_agents_are_one_line_each(workshop: Workshop):
    workshop.slimectl("rollout", "-c", "slimectl.toml", "--agent", "no-such-program", *NO_VERIFIER, code=2)
    assert "rollout.agent: program 'no-such-program' not found" in workshop.stderr
    workshop.slimectl("run", "--agent", "no-such-program", *NO_VERIFIER, "--dry-run", code=2)
    workshop.slimectl("run", "--agent", "no-such-program", *NO_VERIFIER, code=2)
    assert not (workshop.folder / "runs").exists()
    both = ["--agent", "true", "-s", "rollout.custom_generate_function_path=a.py:f"]
    workshop.slimectl("rollout", "-c", "slimectl.toml", *both, code=2)
    assert "rollout.agent and rollout.custom_generate_function_path cannot be combined" in workshop.stderr
    workshop.slimectl("rollout", "-c", "slimectl.toml", "-s", "rollout.agent_max_turns=3", code=2)
    assert "rollout.agent_max_turns has no effect without an agent program" in workshop.stderr
    output = workshop.slimectl("rollout", "-c", "slimectl.toml", "--agent", "true", *NO_VERIFIER, "-n", "1", code=1)
    samples = [json.loads(line) for line in output.splitlines()]
    assert {sample["status"] for sample in samples} == {"failed"}
    assert samples[0]["metadata"]["error"] == "RuntimeError: the agent ended with status 0 before it got a response"
    assert (samples[0]["metadata"]["agent"]["exit_code"], samples[0]["metadata"]["agent"]["turn_count"]) == (0, 0)


def test_a_stage_whose_attempts_all_failed_is_run_again(workshop: Workshop):
    (workshop.folder / "agent.py").write_text("raise SystemExit('no key')\n")
    agent = shlex.join([sys.executable, "agent.py"])
    command = ["rollout", "-c", "slimectl.toml", "--agent", agent, *NO_VERIFIER, "-n", "1"]
    for _ in range(2):
        workshop.slimectl(*command, "-o", "out.jsonl", code=1)
        assert "the first with RuntimeError: the agent ended with status 1 before it got a response: no key" in (
            workshop.stderr
        )


def test_the_script_of_an_agent_is_an_input_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings, out, script = load_settings(values={"rollout.agent": "python agent.py"}), Path("out"), Path("agent.py")
    script.write_text("1")
    out.write_text("{}")
    output = up_to_date("rollout", settings, [], "out", force=False)
    assert output is not None
    output.manifest.write(out, counts={"out": 2, "failed": 1})
    assert up_to_date("rollout", settings, [], "out", force=False) is None
    script.write_text("2")
    assert up_to_date("rollout", settings, [], "out", force=False) is not None


def test_an_agent_whose_file_is_missing_is_refused_by_every_command(workshop: Workshop):
    for words in (
        ["run", "--dry-run"],
        ["run"],
        ["rollout", "--dry-run"],
        ["rollout"],
        ["eval", "--data", "a=b.jsonl"],
    ):
        config = [] if words[0] == "run" else ["-c", "slimectl.toml"]
        output = workshop.slimectl(
            *words, *config, "--agent", f"{shlex.quote(sys.executable)} nofile.py", *NO_VERIFIER, code=2
        ).decode()
        assert "nofile.py: no such file" in workshop.stderr + output
    assert not (workshop.folder / "runs").exists()


TOOL_CLIENT = """
import json, sys
from openai import OpenAI
messages = json.loads(sys.stdin.readline())["messages"]
digit = {"enum": list(range(10))}
schema = {"type": "object", "properties": {"a": digit, "b": digit}, "required": ["a", "b"]}
schema["additionalProperties"] = False
tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
client = OpenAI()
answer = client.chat.completions.create(
    model="policy", messages=messages, tools=tools, tool_choice="required", max_tokens=300
).choices[0].message
[call] = answer.tool_calls
numbers = json.loads(call.function.arguments)
result = {"role": "tool", "tool_call_id": call.id, "content": f"the sum is {sum(numbers.values())}"}
messages += [answer.model_dump(exclude_none=True), result]
client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=4)
print(json.dumps(numbers), file=sys.stderr)
print(numbers["a"] / 9)
"""


def parse_call(text: str) -> dict[str, Any]:
    """Return the call in the notation of CHATML, without what follows it."""
    call: dict[str, Any] = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
    return call


def test_a_client_whose_sampled_calls_are_executed_is_trained_on(workshop: Workshop):
    model = workshop.folder / "with_tools"
    shutil.copytree(workshop.model, model)
    (model / "chat_template.jinja").write_text(CHATML)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (model / "config.json").write_text(json.dumps(config))
    (workshop.folder / "agent.py").write_text(TOOL_CLIENT)
    settings = workshop.folder / "slimectl.toml"
    settings.write_text("".join(line for line in settings.open() if not line.startswith("data = { small")))
    words = ["-s", f"model.path={model}", "-s", "rollout.max_response_len=600", "-s", "run.num_rollout=1"]
    words += ["-s", "run.rollout_batch_size=1", "-s", "rollout.n_samples_per_prompt=2"]
    agent = shlex.join([sys.executable, "agent.py"])
    workshop.slimectl("run", "--agent", agent, *NO_VERIFIER, *words, "--name", "tools")
    step = workshop.folder / "runs" / "tools" / "step_000001"
    samples = [json.loads(line) for line in (step / "samples.jsonl").read_text().splitlines()]
    assert len({sample["reward"] for sample in samples}) > 1
    for sample in samples:
        report = sample["metadata"]["agent"]
        (start, end), _ = report["turns"]
        tokens = sample["tokens"][-sample["response_length"] :][start:end]
        sampled = bytes(token for token in tokens if token < 256).decode()  # one for each byte, then special ones
        numbers = json.loads(report["stderr"])
        assert parse_call(sampled) == {"name": "add", "arguments": numbers}
        assert f"the sum is {numbers['a'] + numbers['b']}" in sample["response"]
        assert (report["exit_code"], report["tool_calls"], sum(sample["loss_mask"][end:])) == (0, 1, 4)
        # The schema forced every letter, and left a choice of ten digits.
        chosen = {chr(token): mask for token, mask in zip(tokens, sample["loss_mask"][start:end], strict=True)}
        assert {mask for text, mask in chosen.items() if text.isascii() and text.isalpha()} == {0}
        assert {mask for text, mask in chosen.items() if text.isdecimal()} == {1}
    [metrics] = [line["metrics"] for line in workshop.metrics("tools") if "train/grad_norm" in line["metrics"]]
    assert metrics["train/grad_norm"] > 0
    assert math.isfinite(metrics["train/loss"])
    before, after = (load_file(folder / "model.safetensors") for folder in (model, step / "policy"))
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())
