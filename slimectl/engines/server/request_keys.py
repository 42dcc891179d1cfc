"""Keys of each endpoint's request body, with names from OpenAI's API, SGLang 0.5.21 and vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from slimectl.chats import shared_keys
from slimectl.chats.request_keys import LABELS, ObjectKeys, names, unset
from slimectl.chats.shared_keys import SAMPLING, SAMPLING_PARAMS, SPACES

_IN_PARAMS = "is a sampling parameter. Put it in sampling_params."
GENERATE = ObjectKeys(
    names(
        "text input_ids sampling_params rid stream return_logprob logprob_start_len top_logprobs_num "
        "return_text_in_logprobs return_routed_experts incremental_streaming_output"
    ),
    LABELS | {"conversation_id", "routing_key", "num_items_assigned", "http_worker_ipc"},
    shared_keys.OF_SGLANG
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
        "messages": "is a key of /v1/chat/completions. Use that endpoint.",
        "response_format": "is a key of OpenAI's API. Put json_schema or regex in sampling_params.",
        "logprobs": "is a key of OpenAI's API. Use return_logprob and top_logprobs_num.",
    },
)

_OPENAI = SAMPLING | names(
    "max_tokens max_completion_tokens min_tokens seed stream stream_options logprobs rid request_id return_token_ids "
    "response_format structured_outputs guided_json guided_regex guided_choice allowed_token_ids prompt_logprobs "
    "include_stop_str_in_output truncate_prompt_tokens truncation_side return_tokens_as_token_ids"
)
_OPENAI_LABELS = LABELS | SPACES | {"guided_decoding_backend"}
COMPLETIONS = ObjectKeys(
    _OPENAI | {"prompt", "echo", "add_special_tokens"},
    _OPENAI_LABELS,
    shared_keys.OPENAI_NEUTRAL | unset("suffix prompt_embeds"),
    shared_keys.OPENAI_REMEDIES | shared_keys.COMPLETION_REMEDIES,
)
CHAT = ObjectKeys(
    _OPENAI
    | names(
        "messages tools tool_choice parallel_tool_calls top_logprobs chat_template_kwargs documents reasoning_effort "
        "continue_final_message add_generation_prompt separate_reasoning"
    ),
    _OPENAI_LABELS,
    shared_keys.OPENAI_NEUTRAL | shared_keys.CHAT_NEUTRAL,
    shared_keys.OPENAI_REMEDIES | shared_keys.CHAT_REMEDIES,
)

_UPDATE_LABELS = names("flush_cache torch_empty_cache is_async token_step")
_UPDATE_NEUTRAL = {"selector": ("all",), "load_format": ("auto",)} | unset("keep_pause recapture_cuda_graph manifest")


def _update(further: str) -> ObjectKeys:
    acts = names(f"weight_version abort_all_requests {further}")
    return ObjectKeys(acts, _UPDATE_LABELS, {key: value for key, value in _UPDATE_NEUTRAL.items() if key not in acts})


ADAPTER = ObjectKeys(names("base fingerprint rank alpha layers"))
_MEMORY = ObjectKeys(frozenset(), neutral={"tags": (["kv_cache"],)})
_EMPTY = ObjectKeys(frozenset())
ENDPOINTS: Mapping[str, ObjectKeys] = {
    "/generate": GENERATE,
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/abort_request": ObjectKeys(names("rid abort_all"), frozenset({"abort_message"}), unset("finished_reason")),
    "/pause_generation": ObjectKeys(names("mode")),
    "/continue_generation": ObjectKeys(frozenset(), frozenset({"torch_empty_cache"})),
    "/flush_cache": _EMPTY,
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
    "/begin_weight_update": ObjectKeys(names("adapter"), neutral={"selector": ("all",)}),
    "/end_weight_update": _EMPTY,
    "/update_weights_from_disk": _update("model_path delta"),
    "/update_weights_from_tensor": _update("load_format name tensors adapter serialized_named_tensors"),
    "/update_weights_from_distributed": _update("names dtypes shapes group_name load_format"),
    "/init_weights_update_group": ObjectKeys(
        names("master_address master_port rank_offset world_size group_name backend")
    ),
    "/destroy_weights_update_group": ObjectKeys(names("group_name")),
    "/update_weight_version": ObjectKeys(names("new_version abort_all_requests")),
    "/weights_checker": ObjectKeys(
        names("action"), neutral={"selector": ("all",), **unset("allow_quant_error skip_tensor_list")}
    ),
}
"""Keys of each endpoint that accepts a body."""
