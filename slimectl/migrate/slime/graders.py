"""Graders with the names of slime's rm_hub. Each calls the verifier of slimectl for the same task."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

from slimectl.errors import RecordError
from slimectl.rewards import Verifier, verifier
from slimectl.rewards.extraction import find_boxed
from slimectl.rewards.math.dapo import canonical as normalize_final_answer
from slimectl.rewards.math.verifier import equal
from slimectl.rewards.text import words
from slimectl.types import Sample

__all__ = ["normalize_final_answer"]


@cache
def _verifier(rm_type: str) -> Verifier:
    return verifier(rm_type)


def _reward(rm_type: str, response: str, label: Any, metadata: dict[str, Any] | None = None) -> Any:
    return _verifier(rm_type)(Sample(response=response, label=label, metadata=dict(metadata or {})))


def extract_answer(passage: str) -> str | None:
    r"""Return the content of the last \boxed{}, or None."""
    box = find_boxed(passage)
    return None if box is None else box.text


extract_boxed_answer = extract_answer


def last_boxed_only_string(string: str) -> str | None:
    r"""Return the last \boxed{} with its content, or None."""
    answer = extract_answer(string)
    return None if answer is None else rf"\boxed{{{answer}}}"


def remove_boxed(s: str | None) -> str | None:
    r"""Return the content of a text that is a single \boxed{}, or None."""
    return s[7:-1] if s is not None and s.startswith(r"\boxed{") and s.endswith("}") else None


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Return the verdict of the verifier `math` on a response. Without a ground truth every response is wrong."""
    return ground_truth not in (None, "") and _reward("math", solution_str, ground_truth) == 1.0


def grade_answer_mathd(given_answer: str | None, ground_truth: str | None) -> bool:
    """Return whether two answers have the same value, by the verifier `math`."""
    return equal(str(ground_truth), str(given_answer)) if None not in (given_answer, ground_truth) else False


grade_answer_sympy = grade_answer_mathd


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """Return the reward of the verifier `deepscaler`, 1 or 0."""
    return 0 if label in (None, "") else int(_reward("deepscaler", response, label))


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    r"""Return the reward of the verifier `dapo`: score, acc and pred. `strict_box_verify` reads the last \boxed{}."""
    reward = _reward("boxed_dapo" if strict_box_verify else "dapo", solution_str, ground_truth)
    return {**reward, "acc": bool(reward["acc"])}


compute_score_dapo = compute_score


def normalize_answer(s: str) -> str:
    """Return the normalised words of an answer: lower case, without punctuation and articles."""
    return " ".join(words(s))


def f1_score(prediction: str | None, ground_truth: Any) -> tuple[float, float, float]:
    """Return (F1, precision, recall) over the words of an answer, by the verifier `f1`. Zeros without a prediction."""
    if prediction is None:
        return 0.0, 0.0, 0.0
    score = float(_reward("f1", prediction, ground_truth))
    predicted, expected = words(prediction), words(str(ground_truth))
    common = (Counter(predicted) & Counter(expected)).total()
    return (score, common / len(predicted), common / len(expected)) if score and common else (score, score, score)


def compute_gpqa_reward(response: str | None, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """Return the reward of the verifier `gpqa`."""
    return 0.0 if response is None else float(_reward("gpqa", response, label, metadata))


def compute_ifbench_reward(response: str | None, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """Return the reward of the verifier `ifbench` for the instructions in the metadata.

    Raises RecordError without instructions.
    """
    if not (metadata or {}).get("instruction_id_list"):
        raise RecordError("metadata.instruction_id_list: missing. ifbench needs the instructions of the prompt.")
    return 0.0 if response is None else float(_reward("ifbench", response, label, metadata))
