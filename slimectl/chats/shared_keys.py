"""Keys of OpenAI's API, SGLang 0.5.21 and vLLM that our servers do not support, with what to do instead."""

from __future__ import annotations

from typing import Any

from slimectl.chats.request_keys import ObjectKeys, names, unset

_TOOLS = "is not supported. Use tools and tool_choice."
_TEMPLATE_SWITCH = "is an argument of the chat template. Put it into chat_template_kwargs."
OF_SGLANG: dict[str, tuple[Any, ...]] = {
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
OPENAI_NEUTRAL = (
    OF_SGLANG
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
OPENAI_REMEDIES = {
    "max_new_tokens": "is a name of /generate. Use max_tokens.",
    "min_new_tokens": "is a name of /generate. Use min_tokens.",
    "sampling_seed": "is a name of /generate. Use seed.",
    "sampling_params": "is a key of /generate. Put its parameters next to the other keys.",
    "extra_body": "is an argument of the openai client. Put its keys next to the others.",
    "ebnf": "is not supported. Use regex or json_schema.",
    "guided_grammar": "is not supported. Use guided_regex or guided_json.",
    "best_of": "is not supported. Use n and choose from the responses.",
    "bad_words": "is not supported. Use logit_bias with -10000 for the ids of single tokens.",
    "stop_regex": "is not supported. Use stop.",
    "lora_path": "is not supported. Merge the adapter into the model that it serves.",
    "return_routed_experts": "is a key of /generate only.",
    "store": "is not supported, which stores no responses. Record them with --record.",
}
COMPLETION_REMEDIES = {
    "messages": "is a key of /v1/chat/completions. Ask there.",
    "top_logprobs": "is a key of /v1/chat/completions. Use logprobs with a number.",
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **unset(
        "audio functions input_ids echo add_special_tokens chat_template reasoning task return_meta_info "
        "return_input_ids_in_sglext return_output_ids_in_sglext return_prompt_text media_io_kwargs mm_processor_kwargs"
    ),
    "modalities": (["text"],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    "stream_reasoning": (True,),
    "include_reasoning": (True,),
}
CHAT_REMEDIES = {
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "prompt": "is a key of /v1/completions. Use messages.",
    "chat_template": "is not supported. Put the template into a chat_template.jinja in the "
    "model's folder, or pass arguments of its template in chat_template_kwargs.",
    "web_search_options": "is not supported, which searches nothing. Leave it out.",
    "reasoning": "is not supported. Use reasoning_effort.",
    "enable_thinking": _TEMPLATE_SWITCH,
    "thinking": _TEMPLATE_SWITCH,
    "include_reasoning": 'is not supported. Drop "reasoning_content" from the response.',
    "input_ids": "is not supported. Send them to /generate, or as prompt to /v1/completions.",
}
SAMPLING = names(
    "temperature top_p top_k min_p n stop stop_token_ids ignore_eos skip_special_tokens no_stop_trim stream_interval "
    "frequency_penalty presence_penalty repetition_penalty logit_bias json_schema regex"
)
"""Sampling parameters with the same name in all APIs."""
SPACES = frozenset({"spaces_between_special_tokens"})
"""Accepted but without effect, because tokenizers from tokenizer.json never add spaces."""
_GRAMMARS = "is not supported. Use regex or json_schema."
_NATIVE_NAMES = {
    "max_tokens": "is a name of OpenAI's API. Use max_new_tokens.",
    "max_completion_tokens": "is a name of OpenAI's API. Use max_new_tokens.",
    "min_tokens": "is a name of OpenAI's API. Use min_new_tokens.",
    "seed": "is a name of OpenAI's API. Use sampling_seed.",
    "ebnf": _GRAMMARS,
}
SAMPLING_PARAMS = ObjectKeys(
    SAMPLING | {"max_new_tokens", "min_new_tokens", "sampling_seed"},
    SPACES,
    neutral={
        **unset("ebnf structural_tag stop_regex custom_params"),
        "beam_width": (1,),
    },
    remedies=_NATIVE_NAMES,
)
STRUCTURED_OUTPUTS = ObjectKeys(
    names("json regex choice json_object"),
    neutral=unset(
        "grammar structural_tag disable_any_whitespace disable_additional_properties whitespace_pattern "
        "disable_fallback"
    ),
    remedies={"grammar": "is not supported by `slimectl serve`. Use regex or json."},
)
STREAM_OPTIONS = ObjectKeys(names("include_usage continuous_usage_stats"), names("include_obfuscation"))
