"""Keys of agents' requests: applied, counted, without effect on a response, or refused.

docs/agents.md has this table for users.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from slimectl.chats.messages import MessageError
from slimectl.chats.request_keys import LABELS, ObjectKeys, is_neutral, names, unset
from slimectl.chats.shared_keys import CHAT_NEUTRAL, CHAT_REMEDIES, COMPLETION_REMEDIES, OPENAI_NEUTRAL, OPENAI_REMEDIES

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Keys that replace settings of [rollout] if a session obeys its requests. Otherwise other values are counted."""
_LEARNED = "would change the distribution that the policy learns from. Leave it out"
_GRAMMAR = f"{_LEARNED}, or use response_format."
UNCOUNTED = "cannot be applied here. Leave it out. If the chat template has a switch, set it in chat_template_kwargs."


@dataclass(frozen=True)
class ApiKeys:
    """Keys of an API's body, and of the objects in it.

    `counted` maps dotted names of keys that ask for another kind of response to their values without effect. A recorded
    session counts such requests, because agents send these keys by default. Other servers refuse them.
    """

    body: ObjectKeys
    objects: Mapping[str, ObjectKeys] = field(default_factory=dict)
    counted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def check(self, values: Mapping[str, Any], *, counts: bool) -> list[str]:
        """Return the keys to count. Raises MessageError for the first key that would be ignored."""
        self.body.check({name: value for name, value in values.items() if name not in self.counted})
        for name, keys in self.objects.items():
            if isinstance(value := values.get(name), dict):
                ignored = {f"{name}.{key}" for key in value} & self.counted.keys()
                keys.check({key: v for key, v in value.items() if f"{name}.{key}" not in ignored}, f"{name}.")
        counted = list(self._unapplied(values))
        if counted and not counts:
            raise MessageError(counted[0], UNCOUNTED)
        return counted

    def _unapplied(self, values: Mapping[str, Any]) -> Iterator[str]:
        for path, neutral in self.counted.items():
            name, _, key = path.partition(".")
            value = values.get(name)
            if key:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None and not is_neutral(value, neutral):
                yield path


_ACTS = names("model stream tools tool_choice chat_template_kwargs") | set(SAMPLING)
_LABELS = LABELS - {"model"} | {"store", "prompt_cache_options", "spaces_between_special_tokens"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **OPENAI_NEUTRAL,
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "separate_reasoning": (True,),
    **unset(
        "logit_bias stop_token_ids ignore_eos no_stop_trim regex json_schema structured_outputs guided_json "
        "guided_regex guided_choice allowed_token_ids suffix web_search_options documents conversation prompt_logprobs "
        "return_token_ids return_tokens_as_token_ids include_stop_str_in_output truncate_prompt_tokens truncation_side"
    ),
}
_REMEDIES = {
    **OPENAI_REMEDIES,
    **dict.fromkeys(names("logit_bias length_penalty typical_p bad_words use_beam_search best_of"), f"{_LEARNED}."),
    **dict.fromkeys(
        names("regex ebnf json_schema structural_tag structured_outputs allowed_token_ids guided_json guided_regex "
              "guided_choice guided_grammar"), _GRAMMAR,
    ),
    **{name: f"{_LEARNED}, or set rollout.{name}." for name in names("frequency_penalty presence_penalty "
       "repetition_penalty stop_token_ids ignore_eos skip_special_tokens")},
    "min_tokens": f"{_LEARNED}, or set rollout.min_new_tokens.",
}  # fmt: skip


def _keys(
    acts: frozenset[str],
    labels: frozenset[str] = frozenset(),
    neutral: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    remedies: Mapping[str, str] = MappingProxyType({}),
) -> ObjectKeys:
    return ObjectKeys(acts, labels, neutral, remedies, server="by this endpoint", docs="docs/agents.md")


_STREAM_OPTIONS = _keys(names("include_usage"), names("include_obfuscation"), unset("continuous_usage_stats"))
_FORMAT = names("format")

CHAT = ApiKeys(
    _keys(
        _ACTS | names("messages max_tokens max_completion_tokens stop n logprobs top_logprobs response_format "
                      "stream_options parallel_tool_calls continue_final_message add_generation_prompt"),
        _LABELS, CHAT_NEUTRAL | _NEUTRAL, CHAT_REMEDIES | _REMEDIES
    ),
    {"stream_options": _STREAM_OPTIONS},
    {"reasoning_effort": (), "verbosity": ("medium",)},
)  # fmt: skip
COMPLETIONS = ApiKeys(
    _keys(
        _ACTS - names("tools tool_choice chat_template_kwargs")
        | names("prompt max_tokens stop n logprobs echo stream_options"),
        _LABELS, _NEUTRAL | {"add_special_tokens": (True,)}, COMPLETION_REMEDIES | _REMEDIES
    ),
    {"stream_options": _STREAM_OPTIONS},
)  # fmt: skip
RESPONSES = ApiKeys(
    _keys(
        _ACTS | names("input instructions previous_response_id max_output_tokens text include top_logprobs "
                      "parallel_tool_calls stream_options"),
        _LABELS,
        {
            "truncation": ("disabled",),
            **unset("background background_options conversation prompt max_tool_calls moderation context_management "
                    "access_programs image"),
        },
        {
            "conversation": "is not supported by this endpoint. Use previous_response_id, or send all of it in input.",
            "prompt": "is not supported by this endpoint, which stores no prompts. Use instructions and input.",
            "truncation": "is not supported by this endpoint except as disabled. Shorten the input yourself.",
            "max_tokens": "is a key of /v1/chat/completions. Use max_output_tokens.",
            "messages": "is a key of /v1/chat/completions. Use input.",
            "response_format": "is a key of /v1/chat/completions. Use text.format.",
        }
    ),
    {"text": _keys(_FORMAT), "stream_options": _keys(frozenset(), names("include_obfuscation"))},
    {"reasoning": (), "text.verbosity": ("medium",)},
)  # fmt: skip
MESSAGES = ApiKeys(
    _keys(
        _ACTS | names("messages system max_tokens stop_sequences output_config"),
        _LABELS - {"store"} | names("cache_control speed inference_geo user_profile_id workspace_id billing_policy"),
        unset("container mcp_servers context_management output_format diagnostics compaction fallbacks thread"),
        {
            "output_format": "is an earlier name. Use output_config.format.",
            "stop": "is a name of OpenAI's API. Use stop_sequences.",
        },
    ),
    {"output_config": _keys(_FORMAT)},
    {"thinking": ({"type": "disabled"},), "output_config.effort": ()},
)
INCLUDES = frozenset({"message.output_text.logprobs", "reasoning.encrypted_content"})
"""Values of `include` of /responses. Reasoning is always in plain text, so it needs no encrypted copy."""
