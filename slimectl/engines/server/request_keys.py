"""Keys of request bodies: which ones each endpoint acts on, and which values of the others change nothing.

A key that an endpoint does not act on is refused by name, unless its value asks for what the server does anyway. Null
asks for nothing under every name. The names are those of OpenAI's API, SGLang 0.5.21 and vLLM.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimectl.engines.server.errors import RequestError


@dataclass(frozen=True)
class Keys:
    """Keys of a JSON object.

    `acts` are implemented. `labels` pass with any value: they name users and requests, or concern what no response
    shows. `neutral` has the values of other keys that change nothing. Empty values never do, and neither does false,
    unless true is listed. `remedies` say what to do instead of a key.
    """

    acts: frozenset[str]
    labels: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    remedies: Mapping[str, str] = field(default_factory=dict)

    def check(self, values: Mapping[str, Any], at: str = "") -> None:
        """Raise RequestError for the first key that would be ignored; `at` is the path of the object."""
        for name, value in values.items():
            if value is None or name in self.acts or name in self.labels:
                continue
            if name not in self.neutral or not _is_neutral(value, self.neutral[name]):
                shown = name[:60] if name.isidentifier() and name.isascii() else ascii(name[:60])
                raise RequestError(f"{at}{shown}: {self._remedy(name)}", field=at + name[:200])

    def _remedy(self, name: str) -> str:
        if name in self.remedies:
            return self.remedies[name]
        if name in self.neutral:
            values = ", ".join(map(json.dumps, self.neutral[name]))
            allowed = f" except as {values}" if values else ""
            return f"is not supported by `slimectl serve`{allowed}. Leave it out."
        near = difflib.get_close_matches(name[:100], self.acts, n=1)
        hint = f"Did you mean {near[0]}?" if near else "docs/serving.md lists the keys of each endpoint."
        return f"unknown key. {hint}"


def _is_neutral(value: Any, values: tuple[Any, ...]) -> bool:
    if value is False or (isinstance(value, str | list | dict) and not value):
        return not (value is False and any(each is True for each in values))
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _unset(text: str) -> dict[str, tuple[Any, ...]]:
    """Return keys that pass only where they ask for nothing."""
    return dict.fromkeys(text.split(), ())


SAMPLING = _names(
    "temperature top_p top_k min_p n stop stop_token_ids ignore_eos skip_special_tokens no_stop_trim stream_interval "
    "frequency_penalty presence_penalty repetition_penalty logit_bias json_schema regex"
)
"""Sampling parameters that have one name in all APIs."""
LABELS = _names(
    "model user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention session_id "
    "custom_labels log_metrics no_logs received_time external_trace_header"
)
_IN_PARAMS = "is a sampling parameter. Put it into sampling_params."
_GRAMMARS = "is not supported by `slimectl serve`. Use regex or json_schema."
_TOOLS = "is not supported by `slimectl serve`. Use tools and tool_choice."
_TEMPLATE_SWITCH = "is an argument of the chat template. Put it into chat_template_kwargs."
_OPENAI_NAMES = {
    "max_new_tokens": "is a name of /generate. Use max_tokens.",
    "min_new_tokens": "is a name of /generate. Use min_tokens.",
    "sampling_seed": "is a name of /generate. Use seed.",
    "sampling_params": "is a key of /generate. Put its parameters beside the other keys.",
    "extra_body": "is an argument of the openai client. Put its keys beside the others.",
}
_NATIVE_NAMES = {
    "max_tokens": "is a name of OpenAI's API. Use max_new_tokens.",
    "max_completion_tokens": "is a name of OpenAI's API. Use max_new_tokens.",
    "min_tokens": "is a name of OpenAI's API. Use min_new_tokens.",
    "seed": "is a name of OpenAI's API. Use sampling_seed.",
    "ebnf": _GRAMMARS,
}
_OF_SGLANG: dict[str, tuple[Any, ...]] = {
    **_unset(
        "lora_path session_params custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room "
        "disagg_prefill_dp_rank extra_key cache_salt priority return_hidden_states return_sampling_mask "
        "sampling_logprobs_mode max_dynamic_patch min_dynamic_patch use_audio_in_video video_config "
        "return_prompt_token_ids"
    ),
    "priority": (0,),
    "data_parallel_rank": (0,),
    "routed_dp_rank": (0,),
    "routed_experts_start_len": (0,),
}

SAMPLING_PARAMS = Keys(
    SAMPLING | {"max_new_tokens", "min_new_tokens", "sampling_seed"},
    neutral={
        **_unset("ebnf structural_tag stop_regex custom_params"),
        "beam_width": (1,),
        "spaces_between_special_tokens": (True,),
    },
    remedies=_NATIVE_NAMES,
)
GENERATE = Keys(
    _names(
        "text input_ids sampling_params rid stream return_logprob logprob_start_len top_logprobs_num "
        "return_text_in_logprobs return_routed_experts incremental_streaming_output"
    ),
    LABELS | {"conversation_id", "routing_key", "num_items_assigned", "http_worker_ipc"},
    _OF_SGLANG
    | _unset(
        "input_embeds image_data video_data audio_data mm_hashes mm_content_hashes token_ids_logprob lora_id "
        "return_flat_raw_top_logprobs return_flat_raw_top_logprobs_b64 return_indexer_topk modalities "
        "positional_embed_overrides bootstrap_pair_key decode_tp_size background require_reasoning "
        "max_thinking_tokens return_bytes return_entropy need_wait_for_mm_inputs encoder_urls kv_hints "
        "image_max_dynamic_patch video_max_dynamic_patch multi_item_delimiter_indices token_indices_to_pool"
    ),
    {
        **dict.fromkeys(SAMPLING | SAMPLING_PARAMS.acts | SAMPLING_PARAMS.neutral.keys(), _IN_PARAMS),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), f"{_IN_PARAMS[:-1]} as max_new_tokens."),
        "min_tokens": f"{_IN_PARAMS[:-1]} as min_new_tokens.",
        "seed": f"{_IN_PARAMS[:-1]} as sampling_seed.",
        "prompt": "is a key of /v1/completions. Use text or input_ids.",
        "messages": "is a key of /v1/chat/completions. Ask there.",
        "response_format": "is a key of OpenAI's API. Put json_schema or regex into sampling_params.",
        "logprobs": "is a key of OpenAI's API. Use return_logprob and top_logprobs_num.",
    },
)
STRUCTURED_OUTPUTS = Keys(
    _names("json regex choice json_object"),
    neutral=_unset(
        "grammar structural_tag disable_any_whitespace disable_additional_properties whitespace_pattern "
        "disable_fallback"
    ),
    remedies={"grammar": "is not supported by `slimectl serve`. Use regex or json."},
)
RESPONSE_FORMAT = Keys(_names("type json_schema"))
RESPONSE_SCHEMA = Keys(_names("schema"), _names("name description strict"))
"""`strict` is no choice here: a schema is always kept."""
STREAM_OPTIONS = Keys(_names("include_usage continuous_usage_stats"), neutral={"include_obfuscation": ()})

_OPENAI = SAMPLING | _names(
    "max_tokens max_completion_tokens min_tokens seed stream stream_options logprobs rid request_id return_token_ids "
    "response_format structured_outputs guided_json guided_regex guided_choice allowed_token_ids prompt_logprobs "
    "include_stop_str_in_output truncate_prompt_tokens truncation_side return_tokens_as_token_ids"
)
_OPENAI_LABELS = LABELS | {"guided_decoding_backend"}
_OPENAI_NEUTRAL = (
    _OF_SGLANG
    | _unset(
        "store stop_regex ebnf custom_params return_routed_experts return_cached_tokens_details "
        "return_spec_tokens_details guided_grammar guided_whitespace_pattern structural_tag bad_words use_beam_search "
        "early_stopping logits_processors logprob_token_ids watermarking thinking_token_budget repetition_detection "
        "vllm_xargs kv_transfer_params ec_transfer_params return_mm_kwargs return_token_offsets background prediction "
        "moderation prompt_cache_options"
    )
    | {
        "best_of": (1,),
        "length_penalty": (1.0,),
        "typical_p": (1.0,),
        "top_a": (0.0,),
        "spaces_between_special_tokens": (True,),
        "truncation": ("disabled",),
        "mm_payload": ("tensors",),
        "routed_experts_prompt_start": (0,),
    }
)
_OPENAI_REMEDIES = {
    **_OPENAI_NAMES,
    "ebnf": _GRAMMARS,
    "guided_grammar": "is not supported by `slimectl serve`. Use guided_regex or guided_json.",
    "best_of": "is not supported by `slimectl serve`. Use n and choose from the responses.",
    "bad_words": "is not supported by `slimectl serve`. Use logit_bias with -10000 for the ids of single tokens.",
    "stop_regex": "is not supported by `slimectl serve`. Use stop.",
    "lora_path": "is not supported by `slimectl serve`. Merge the adapter into the model that it serves.",
    "return_routed_experts": "is a key of /generate only.",
    "store": "is not supported by `slimectl serve`, which stores no responses. Record them with --record.",
}
COMPLETIONS = Keys(
    _OPENAI | {"prompt", "echo", "add_special_tokens"},
    _OPENAI_LABELS,
    _OPENAI_NEUTRAL | _unset("suffix prompt_embeds"),
    _OPENAI_REMEDIES
    | {
        "messages": "is a key of /v1/chat/completions. Ask there.",
        "top_logprobs": "is a key of /v1/chat/completions. Use logprobs with a number.",
    },
)
CHAT = Keys(
    _OPENAI
    | _names(
        "messages tools tool_choice parallel_tool_calls top_logprobs chat_template_kwargs documents reasoning_effort "
        "continue_final_message add_generation_prompt separate_reasoning"
    ),
    _OPENAI_LABELS,
    _OPENAI_NEUTRAL
    | _unset(
        "audio web_search_options functions input_ids echo add_special_tokens chat_template reasoning task "
        "return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext return_prompt_text media_io_kwargs "
        "mm_processor_kwargs"
    )
    | {
        "modalities": (["text"],),
        "function_call": ("none", "auto"),
        "verbosity": ("medium",),
        "stream_reasoning": (True,),
        "include_reasoning": (True,),
    },
    _OPENAI_REMEDIES
    | {
        "functions": _TOOLS,
        "function_call": _TOOLS,
        "prompt": "is a key of /v1/completions. Use messages.",
        "chat_template": "is not supported by `slimectl serve`. Put the template into a chat_template.jinja in the "
        "model's folder, or pass arguments of its template in chat_template_kwargs.",
        "reasoning": "is not supported by `slimectl serve`. Use reasoning_effort.",
        "enable_thinking": _TEMPLATE_SWITCH,
        "thinking": _TEMPLATE_SWITCH,
        "include_reasoning": 'is not supported by `slimectl serve`. Drop "reasoning_content" from the response.',
        "input_ids": "is not supported by `slimectl serve`. Send them to /generate, or as prompt to /v1/completions.",
    },
)

_UPDATE_LABELS = _names("flush_cache torch_empty_cache is_async token_step")
_UPDATE_NEUTRAL = {"selector": ("all",), "load_format": ("auto",)} | _unset("keep_pause recapture_cuda_graph manifest")


def _update(names: str) -> Keys:
    acts = _names(f"weight_version abort_all_requests {names}")
    return Keys(acts, _UPDATE_LABELS, {key: value for key, value in _UPDATE_NEUTRAL.items() if key not in acts})


ADAPTER = Keys(_names("base fingerprint rank alpha layers"))
_MEMORY = Keys(frozenset(), neutral={"tags": (["kv_cache"],)})
_EMPTY = Keys(frozenset())
ENDPOINTS: Mapping[str, Keys] = {
    "/generate": GENERATE,
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/abort_request": Keys(_names("rid abort_all"), frozenset({"abort_message"}), _unset("finished_reason")),
    "/pause_generation": Keys(_names("mode")),
    "/continue_generation": Keys(frozenset(), frozenset({"torch_empty_cache"})),
    "/flush_cache": _EMPTY,
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
    "/begin_weight_update": Keys(_names("adapter"), neutral={"selector": ("all",)}),
    "/end_weight_update": _EMPTY,
    "/update_weights_from_disk": _update("model_path delta"),
    "/update_weights_from_tensor": _update("load_format name tensors adapter serialized_named_tensors"),
    "/update_weights_from_distributed": _update("names dtypes shapes group_name load_format"),
    "/init_weights_update_group": Keys(_names("master_address master_port rank_offset world_size group_name backend")),
    "/destroy_weights_update_group": Keys(_names("group_name")),
    "/update_weight_version": Keys(_names("new_version abort_all_requests")),
    "/weights_checker": Keys(
        _names("action"), neutral={"selector": ("all",), **_unset("allow_quant_error skip_tensor_list")}
    ),
}
"""Keys of each endpoint that reads a body."""
