"""The rewards of a ROLL configuration, which go by the tag of a row."""

from __future__ import annotations

from slimectl.settings.launch_scripts.conversion import Conversion
from slimectl.settings.launch_scripts.roll_keys import TRAIN

WORKERS = {
    "MathRuleRewardWorker": "math",
    "GSM8KMathRewardWorker": "math",
    "Geo3kRewardWorker": "math",
    "CodeSandboxRewardWorker": "code",
    "GeneralRuleRewardWorker": "ifeval",
    "CrossThinkQARuleRewardWorker": "boxed_gpqa",
    "MultipleChoiceBoxedRuleRewardWorker": "boxed_gpqa",
    "GeneralValRuleRewardWorker": "gpqa",
}
"""The verifier of each class of workers."""
NOTES = {
    "code": "give rows metadata.tests, which `code` reads in place of test_cases",
    "ifeval": "give rows metadata.instruction_id_list and kwargs, which `ifeval` reads in place of ground_truth",
}


def settle_reward(conversion: Conversion) -> None:
    """Set the verifier of every domain; one without a counterpart is listed first."""
    domains = dict.fromkeys(name.split(".")[1] for name in conversion.flags if name.startswith("rewards."))
    types: dict[str, str] = {}
    sources: list[str] = []
    for domain in domains:
        worker, tags = f"rewards.{domain}.worker_cls", f"rewards.{domain}.tag_included"
        kind = conversion.text(worker).rpartition(".")[2]
        listed = conversion.flags[tags].texts if tags in conversion.flags and not conversion.is_unknown(tags) else []
        sources += [name for name in (worker, tags) if name in conversion.flags]
        if kind in WORKERS:
            types |= dict.fromkeys(listed or [domain], WORKERS[kind])
            continue
        place = ", ".join(listed) or domain
        key = "score.rm_options.types" if len(domains) > 1 else "score.rm_type"
        worker_class = f"{kind or 'no class'} of rewards.{domain}"
        conversion.ask_for(
            key, f"{worker_class} grades {place}. Give its verifier, judge or function (docs/verifiers.md)"
        )
    for name in sources:
        conversion.unlist(name)
    if len(domains) == 1 and types:
        conversion.put("score.rm_type", next(iter(types.values())), *sources)
    elif types:
        conversion.put("score.rm_type", "by_column", "the rewards of the file go by the tag of a row")
        column = conversion.text(f"{TRAIN}data_args.tag", "tag")
        conversion.put("score.rm_options.column", column, "the tag of a row names its reward")
        conversion.put("score.rm_options.types", types, *(name for name in sources if name.endswith("tag_included")))
    for kind in dict.fromkeys(types.values()):
        if kind in NOTES:
            conversion.omit_key("rollout.data", NOTES[kind])
