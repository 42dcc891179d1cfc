"""ROLL's rewards by domain: verifiers with their options, judges, and filters of prompts."""

from __future__ import annotations

from typing import Any

from slimectl.migrate.launch_scripts.conversion import Conversion, typed
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.roll_keys import LAYOUT, TRAIN
from slimectl.migrate.launch_scripts.values import number

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
JUDGES = "LLMJudgeRewardWorker"
"""End of the names of classes whose workers ask a judge."""
NOTES = {
    "code": "give rows metadata.tests, which `code` reads in place of test_cases",
    "ifeval": "give rows metadata.instruction_id_list and kwargs, which `ifeval` reads in place of ground_truth",
}
OF_WORKERS = (
    "model_args.", "data_args.", "strategy_args.", "training_args.", "generating_args.", "system_envs.", "world_size",
    "infer_batch_size", "device_mapping", "num_gpus_per_worker", "name", "use_local", "code_url", "judge_",
    "query_filter_config.", "response_filter_config.", "tag_included", "worker_cls",
)  # fmt: skip
"""Keys of a domain that place its worker, or that become options of its verifier."""
JUDGING = {"generating_args.max_new_tokens": "max_tokens", "generating_args.temperature": "temperature",
           "judge_model_name": "model", "judge_api_url": "url", "model_args.model_name_or_path": "model"}  # fmt: skip
"""Keys of a judge's domain, by the option of `judge`."""
REWARD_TYPE = "a verifier grades by one rule (docs/verifiers.md)"
LENGTH_PENALTY = 'make the reward of the domain a sum with {type = "length_penalty", weight = …} (docs/verifiers.md)'


def unlisted_reward(conversion: Conversion, flag: Flag) -> None:
    """List a key of a domain. Keys that place a worker have no effect here, and others are left to the user."""
    _, _, name = flag.name.split(".", 2) if flag.name.count(".") > 1 else ("", "", flag.name)
    if name == "response_length_penalty_coef" and _number(flag) == 0:
        conversion.note_equal(flag.name)
    elif name == "response_length_penalty_coef":
        conversion.omit(flag, LENGTH_PENALTY, by_hand=True)
    elif name in ("reward_type", "format_pattern"):
        conversion.omit(flag, REWARD_TYPE)
    elif name.startswith(OF_WORKERS):
        conversion.omit(flag, LAYOUT)
    else:
        domain = flag.name.split(".")[1]
        reason = f"belongs to the worker of rewards.{domain}. Give it to your own function as custom.{name}"
        conversion.omit(flag, reason, by_hand=True)


def _number(flag: Flag) -> float | None:
    try:
        return number(flag)
    except ValueError:
        return None


def domains_of(conversion: Conversion) -> dict[str, list[str]]:
    """The domains of the rewards, with the tags of their rows. Without tags the domain's name is one."""
    domains = dict.fromkeys(name.split(".")[1] for name in conversion.flags if name.startswith("rewards."))
    return {domain: _tags(conversion, domain) or [domain] for domain in domains}


def _tags(conversion: Conversion, domain: str) -> list[str]:
    name = f"rewards.{domain}.tag_included"
    flag = conversion.flags.get(name)
    return flag.texts if flag and not conversion.is_unknown(name) else []


def settle_reward(conversion: Conversion) -> None:
    """Set the verifier of every domain. A domain without a counterpart is listed first."""
    domains = domains_of(conversion)
    types: dict[str, Any] = {}
    sources: list[str] = []
    for domain, tags in domains.items():
        worker = f"rewards.{domain}.worker_cls"
        kind = conversion.text(worker).rpartition(".")[2]
        if kind in WORKERS or kind.endswith(JUDGES):
            sources += [name for name in (worker, f"rewards.{domain}.tag_included") if name in conversion.flags]
            verifier = _judge(conversion, domain, sources) if kind.endswith(JUDGES) else WORKERS[kind]
            types |= dict.fromkeys(tags, verifier)
            if isinstance(verifier, dict):
                _ask_for_judge(conversion, domain, tags, verifier, is_only=len(domains) == 1)
            continue
        key = "score.rm_options.types" if len(domains) > 1 else "score.rm_type"
        worker_class = f"{kind or 'no class'} of rewards.{domain}"
        place = ", ".join(_tags(conversion, domain)) or domain
        conversion.ask_for(key, f"{worker_class} grades {place}. Give its verifier or function (docs/verifiers.md)")
    conversion.unlist(*sources)
    if len(domains) == 1 and types:
        _put_verifier(conversion, next(iter(types.values())), sources)
    elif types:
        conversion.put("score.rm_type", "by_column", "the rewards of the file go by the tag of a row")
        column = conversion.text(f"{TRAIN}data_args.tag", "tag")
        conversion.put("score.rm_options.column", column, "the tag of a row names its reward")
        conversion.put("score.rm_options.types", types, *sources)
    for kind in dict.fromkeys(entry for entry in types.values() if isinstance(entry, str)):
        if kind in NOTES:
            conversion.ask_for("rollout.data", NOTES[kind], first=False)
    _settle_filters(conversion, list(domains))


def settle_domains(conversion: Conversion) -> None:
    """Draw prompts by the weights of their domains. ROLL finds a row's domain by its tag, if no column has it."""
    prefix = f"{TRAIN}data_args.domain_interleave_probs."
    names = [name for name in conversion.flags if name.startswith(prefix)]
    shares = {name.removeprefix(prefix): conversion.real(name, 0.0) for name in names}
    if len(shares) < 2 or conversion.is_unknown(*names):
        return
    conversion.unlist(*names)
    tags = {domain: _tags(conversion, domain) for domain in shares}
    if all(len(found_tags) == 1 for found_tags in tags.values()):
        shares = {tags[domain][0]: share for domain, share in shares.items()}
        column = conversion.text(f"{TRAIN}data_args.tag", "tag")
        conversion.put("rollout.domain_key", column, "the tag of a row names its domain")
    else:
        listed = "; ".join(f"{domain}: {', '.join(found_tags) or domain}" for domain, found_tags in tags.items())
        reason = f"give rows the column domain, by their tags ({listed})"
        conversion.ask_for("rollout.data", reason, first=False)
    conversion.take_back("rollout.data_weights", "the weights of domains decide which prompt comes next")
    conversion.put("rollout.domain_weights", {domain: share for domain, share in shares.items() if share > 0}, *names)


def _put_verifier(conversion: Conversion, verifier: str | dict[str, Any], sources: list[str]) -> None:
    """Set the only verifier, with its options."""
    options = {"type": verifier} if isinstance(verifier, str) else verifier
    for option, value in options.items():
        key = "score.rm_type" if option == "type" else f"score.rm_options.{option}"
        conversion.put(key, value, *sources)


def _judge(conversion: Conversion, domain: str, sources: list[str]) -> dict[str, Any]:
    """The options of a domain's judge."""
    judge: dict[str, Any] = {"type": "judge"}
    for leaf, option in JUDGING.items():
        name = f"rewards.{domain}.{leaf}"
        is_local = conversion.text(f"rewards.{domain}.judge_model_type") != "api"
        if name in conversion.flags and not conversion.is_unknown(name) and (is_local or "model_args" not in leaf):
            judge.setdefault(option, typed(conversion.flags[name]))
            sources.append(name)
    body = [
        name for key in ("top_p", "top_k") if (name := f"rewards.{domain}.generating_args.{key}") in conversion.flags
    ]
    if body and not conversion.is_unknown(*body):
        judge["body"] = {name.rpartition(".")[2]: typed(conversion.flags[name]) for name in body}
        sources += body
    if f"rewards.{domain}.judge_api_key" in conversion.flags:
        judge["api_key_env"] = "JUDGE_API_KEY"
        sources.append(f"rewards.{domain}.judge_api_key")
    sources.append(f"rewards.{domain}.judge_model_type")
    return judge


def _ask_for_judge(
    conversion: Conversion, domain: str, tags: list[str], judge: dict[str, Any], *, is_only: bool
) -> None:
    """List what a judge needs and the file does not have: the address of its server, and the text of its prompt."""
    place = "score.rm_options" if is_only else f"score.rm_options.types.{tags[0]}"
    if "url" not in judge:
        start = f"`slimectl serve {judge.get('model', 'MODEL')}`"
        reason = f"the address of the judge, as http://HOST:PORT/v1. Start it with {start}"
        conversion.ask_for(f"{place}.url", reason, first=False)
    name = f"rewards.{domain}.judge_prompt"
    if name in conversion.flags:
        conversion.unlist(name)
        reason = f"is a text of ROLL. Set {place}.template, and {place}.values for answers such as YES and NO"
        conversion.omit(conversion.flags[name], reason, by_hand=True)


def _settle_filters(conversion: Conversion, domains: list[str]) -> None:
    """Replace groups that a domain's filter refuses by other groups."""
    names = [name for domain in domains if (name := f"rewards.{domain}.query_filter_config.type") in conversion.flags]
    kinds = {conversion.text(name) for name in names} - {"no_filter"}
    if not kinds:
        return
    conversion.put("rollout.dynamic_sampling_filter_path", "slimectl.stages.filters:nonzero_std", *names)
    conversion.unlist(*names)
    bounds = [name for name in conversion.flags if name.startswith("rewards.") and "filter_args.threshold_" in name]
    for name in bounds:
        conversion.unlist(name)
        reason = "groups whose rewards are equal are replaced. Set rollout.dynamic_sampling_filter_path for others"
        conversion.omit(conversion.flags[name], reason)
