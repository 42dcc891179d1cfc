"""Keys of each endpoint's request body. The names come from OpenAI's API, SGLang 0.5.21 and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimectl.chats.request_keys import LABELS, Keys, names, unset

SAMPLING = names(
    "temperature top_p top_k min_p n stop stop_token_ids ignore_eos skip_special_tokens no_stop_trim stream_interval "
    "frequency_penalty presence_penalty repetition_penalty logit_bias json_schema regex"
)
"""Sampling parameters that have one name in all APIs."""
SPACES = frozenset({"spaces_between_special_tokens"})
"""Tokenizers of tokenizer.json, which are all that are read, add none whatever it says."""
_IN_PARAMS = "is a sampling parameter. Put it into sampling_params."
_GRAMMARS = "is not supported by `slimectl serve`. Use regex or json_schema."
_TOOLS = "is not supported by `slimectl serve`. Use tools and tool_choice."
_TEMPLATE_SWITCH = "is an argument of the chat template. Put it into chat_template_kwargs."
_OPENAI_NAMES = {
    "max_new_tokens": "is a name of /generate. Use max_tokens.",
    "min_new_tokens": "is a name of /generate. Use min_tokens.",
    "sampling_seed": "is a name of /generate. Use seed.",
    "sampling_params": "is a key of /generate. Put its parameters next to the other keys.",
    "extra_body": "is an argument of the openai client. Put its keys next to the others.",
}
_NATIVE_NAMES = {
    "max_tokens": "is a name of OpenAI's API. Use max_new_tokens.",
    "max_completion_tokens": "is a name of OpenAI's API. Use max_new_tokens.",
    "min_tokens": "is a name of OpenAI's API. Use min_new_tokens.",
    "seed": "is a name of OpenAI's API. Use sampling_seed.",
    "ebnf": _GRAMMARS,
}
_OF_SGLANG: dict[str, tuple[Any, ...]] = {
    **unset(
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
    SPACES,
    neutral={
        **unset("ebnf structural_tag stop_regex custom_params"),
        "beam_width": (1,),
    },
    remedies=_NATIVE_NAMES,
)
GENERATE = Keys(
    names(
        "text input_ids sampling_params rid stream return_logprob logprob_start_len top_logprobs_num "
        "return_text_in_logprobs return_routed_experts incremental_streaming_output"
    ),
    LABELS | {"conversation_id", "routing_key", "num_items_assigned", "http_worker_ipc"},
    _OF_SGLANG
    | unset(
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
    names("json regex choice json_object"),
    neutral=unset(
        "grammar structural_tag disable_any_whitespace disable_additional_properties whitespace_pattern "
        "disable_fallback"
    ),
    remedies={"grammar": "is not supported by `slimectl serve`. Use regex or json."},
)
STREAM_OPTIONS = Keys(names("include_usage continuous_usage_stats"), names("include_obfuscation"))

_OPENAI = SAMPLING | names(
    "max_tokens max_completion_tokens min_tokens seed stream stream_options logprobs rid request_id return_token_ids "
    "response_format structured_outputs guided_json guided_regex guided_choice allowed_token_ids prompt_logprobs "
    "include_stop_str_in_output truncate_prompt_tokens truncation_side return_tokens_as_token_ids"
)
_OPENAI_LABELS = LABELS | SPACES | {"guided_decoding_backend"}
_OPENAI_NEUTRAL = (
    _OF_SGLANG
    | unset(
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
    _OPENAI_NEUTRAL | unset("suffix prompt_embeds"),
    _OPENAI_REMEDIES
    | {
        "messages": "is a key of /v1/chat/completions. Ask there.",
        "top_logprobs": "is a key of /v1/chat/completions. Use logprobs with a number.",
    },
)
CHAT = Keys(
    _OPENAI
    | names(
        "messages tools tool_choice parallel_tool_calls top_logprobs chat_template_kwargs documents reasoning_effort "
        "continue_final_message add_generation_prompt separate_reasoning"
    ),
    _OPENAI_LABELS,
    _OPENAI_NEUTRAL
    | unset(
        "audio functions input_ids echo add_special_tokens chat_template reasoning task "
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
        "web_search_options": "is not supported by `slimectl serve`, which searches nothing. Leave it out.",
        "reasoning": "is not supported by `slimectl serve`. Use reasoning_effort.",
        "enable_thinking": _TEMPLATE_SWITCH,
        "thinking": _TEMPLATE_SWITCH,
        "include_reasoning": 'is not supported by `slimectl serve`. Drop "reasoning_content" from the response.',
        "input_ids": "is not supported by `slimectl serve`. Send them to /generate, or as prompt to /v1/completions.",
    },
)

_UPDATE_LABELS = names("flush_cache torch_empty_cache is_async token_step")
_UPDATE_NEUTRAL = {"selector": ("all",), "load_format": ("auto",)} | unset("keep_pause recapture_cuda_graph manifest")


def _update(further: str) -> Keys:
    acts = names(f"weight_version abort_all_requests {further}")
    return Keys(acts, _UPDATE_LABELS, {key: value for key, value in _UPDATE_NEUTRAL.items() if key not in acts})


ADAPTER = Keys(names("base fingerprint rank alpha layers"))
_MEMORY = Keys(frozenset(), neutral={"tags": (["kv_cache"],)})
_EMPTY = Keys(frozenset())
ENDPOINTS: Mapping[str, Keys] = {
    "/generate": GENERATE,
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/abort_request": Keys(names("rid abort_all"), frozenset({"abort_message"}), unset("finished_reason")),
    "/pause_generation": Keys(names("mode")),
    "/continue_generation": Keys(frozenset(), frozenset({"torch_empty_cache"})),
    "/flush_cache": _EMPTY,
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
    "/begin_weight_update": Keys(names("adapter"), neutral={"selector": ("all",)}),
    "/end_weight_update": _EMPTY,
    "/update_weights_from_disk": _update("model_path delta"),
    "/update_weights_from_tensor": _update("load_format name tensors adapter serialized_named_tensors"),
    "/update_weights_from_distributed": _update("names dtypes shapes group_name load_format"),
    "/init_weights_update_group": Keys(names("master_address master_port rank_offset world_size group_name backend")),
    "/destroy_weights_update_group": Keys(names("group_name")),
    "/update_weight_version": Keys(names("new_version abort_all_requests")),
    "/weights_checker": Keys(
        names("action"), neutral={"selector": ("all",), **unset("allow_quant_error skip_tensor_list")}
    ),
}
"""Keys of each endpoint that reads a body."""
