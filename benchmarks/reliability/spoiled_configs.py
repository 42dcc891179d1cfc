"""Ways to spoil a model folder: nonsense in its configs, code that travels along, tokenizers and chat templates."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spoiled_files import ANY, BROKEN_JSON, LOADS, SAMPLES, Attack, edited, written

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size",
         "max_position_embeddings", "num_key_value_heads", "head_dim")  # fmt: skip
NONSENSE = (-1, 0, 2.5, 64.0, "64", True, [], {}, float("nan"), float("inf"), 2**31, 10**12, 10**4000)
TEMPLATES = {
    "malformed": "{% if %}",
    "an open block": "{% for m in messages %}",
    "two loops without end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro in itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "10**10 characters": "{{ 'a' * 10**10 }}",
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "reaching for classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reaching for globals": "{{ cycler.__init__.__globals__.os.system('touch ../proof') }}",
    "reaching by attr": "{{ ''|attr('__class__') }}",
    "an include": "{% include '../secret' %}{% import '/etc/passwd' as p %}",
    "padding": "{{ 'x'|center(10**11) }}",
    "a format": "{{ '%1000000000000d' % 1 }}",
    "an exception": "{{ raise_exception('no') }}",
    "a division": "{{ 1 / 0 }}",
}


def of_configs(draw: random.Random) -> Iterator[Attack]:
    for text in BROKEN_JSON[:-1]:
        must = ANY if text.startswith('{"a": 9') else LOADS
        yield Attack("config.json that is no object", repr(text[:20]), written("config.json", text), must)
    for key in SIZES:
        for value in NONSENSE:
            small = key == "max_position_embeddings" and value in (2**31, 10**12)
            must = ANY if small or (key == "intermediate_size" and value == 2**31) else LOADS
            yield Attack(
                "sizes in config.json", f"{key} {str(value)[:20]}", edited("config.json", **{key: value}), must
            )
    other = {
        "model_type": ("nonsense", 7, None, ["llama"], "gpt2", "bert", "mamba", "qwen3_moe", "deepseek_v3", "t5", ...),
        "rope_parameters": (7, [], {"rope_type": "nonsense"}, {"rope_theta": 0}, {"rope_type": 7}, {"rope_theta": "x"}),
        "layer_types": ("full_attention", [7], ["nonsense"] * 4, ["linear_attention"] * 4, [[]], ["x"] * 10**5),
        "hidden_act": ("nonsense", 7, None, "__import__('os').system('touch ../proof')"),
        "dtype": ("float99", 7, "os.system", "__builtins__", ["float32"]),
        "quantization_config": ("fp8", {}, {"quant_method": "fp8"}, {"quant_method": []},
                                {"quant_method": "fp8", "weight_block_size": ["a", 0]}),
        "rms_norm_eps": (0, -1.0, float("nan"), "1e-6", [], float("inf")),
        "eos_token_id": (-5, 10**9, "x", [[]], {}, [1, "2"], 2.5),
        "architectures": ("LlamaForCausalLM", [7], ["os.system"], {}, ["NoSuchModel"]),
        "tie_word_embeddings": ("yes", 1, [], {}),
        "attention_bias": (True, "x", 7),
        "attn_implementation": ("nonsense", "flash_attention_2", 7),
        "_attn_implementation": ("nonsense", 7),
        "transformers_version": (7, "99.0", []),
        "text_config": (7, {"hidden_size": -1}, []),
        "attention_dropout": ("x", -1, float("nan"), []),
        "num_labels": (-1, 10**9, "x"),
        "id2label": (7, "x", {"a": "b"}, []),
        "torch_dtype": ("float99", 7, []),
        "return_dict": ("x", 7),
        "pretraining_tp": (0, "x", 2**40),
        "use_cache": ("x", 7),
        "sliding_window": (-1, "x", 4),
    }  # fmt: skip
    for key, values in other.items():
        for value in values:
            yield Attack("other keys of config.json", f"{key} {str(value)[:40]}", edited("config.json", **{key: value}))
    yield Attack(
        "contradictions",
        "3 heads, 2 groups",
        edited("config.json", num_attention_heads=3, num_key_value_heads=2),
        LOADS,
    )
    yield Attack("contradictions", "8 groups of 4 heads", edited("config.json", num_key_value_heads=8), LOADS)
    yield Attack("contradictions", "a vocabulary of 8", edited("config.json", vocab_size=8), LOADS)
    yield Attack("contradictions", "one token fewer", edited("config.json", vocab_size=258), LOADS)
    yield Attack("contradictions", "10**5 layers", edited("config.json", num_hidden_layers=10**5), LOADS)
    yield Attack("contradictions", "two layers fewer", edited("config.json", num_hidden_layers=2), LOADS)
    yield Attack("contradictions", "a context of 1", edited("config.json", max_position_embeddings=1))


def of_code(draw: random.Random) -> Iterator[Attack]:
    """auto_map names code in the folder: it is neither run nor asked about."""
    code = "import os\nos.system('touch ../proof')\nos.system('touch proof')\nclass C: pass\n"

    def with_code(name: str, **changes: Any) -> Callable[[Path], None]:
        def spoil(folder: Path) -> None:
            (folder / "modeling_x.py").write_text(code)
            (folder / "__init__.py").write_text(code)
            edited(name, **changes)(folder)

        return spoil

    maps = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModel"), "modeling_x.C")
    for model_type in ("llama", "nonsense", ...):
        yield Attack(
            "code that travels along",
            f"AutoConfig, {model_type}",
            with_code("config.json", auto_map=maps, model_type=model_type),
        )
    tokens = {"AutoTokenizer": ["modeling_x.C", "modeling_x.C"]}
    for kind in ("PreTrainedTokenizerFast", "C", "os.system", 7, None, ...):
        yield Attack(
            "code that travels along",
            f"AutoTokenizer, {kind}",
            with_code("tokenizer_config.json", auto_map=tokens, tokenizer_class=kind),
        )
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        for value in (7, [], "modeling_x.C", {"AutoConfig": 7}, {"AutoTokenizer": []}, {"AutoConfig": "../../x.C"}):
            yield Attack("code that travels along", f"{name}: auto_map {value}", with_code(name, auto_map=value))
    yield Attack("code that travels along", "custom_generate", with_code("generation_config.json", custom_generate="."))


def of_tokenizers(draw: random.Random) -> Iterator[Attack]:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        for text in BROKEN_JSON:
            yield Attack("broken tokenizer files", f"{name} {text[:20]!r}", written(name, text))
    for key, values in {
        "model": (
            None,
            7,
            {},
            {"type": "BPE", "vocab": {"a": -1}, "merges": []},
            {"type": "BPE", "vocab": {"a": 2**40}, "merges": []},
            {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]},
            {"type": "Unigram", "vocab": [["a", "x"]]},
            {"type": "WordPiece", "vocab": {}},
            {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": ["a"]},
            {"type": "Unigram", "vocab": [], "unk_id": 99},
        ),
        "pre_tokenizer": (
            7,
            {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
            {"type": "nonsense"},
            {"type": "Sequence", "pretokenizers": 7},
        ),
        "decoder": (7, {"type": "nonsense"}, {"type": "Replace", "pattern": {"Regex": "["}, "content": "x"}),
        "post_processor": (
            7,
            {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": 7},
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            },
        ),
        "added_tokens": (
            7,
            [{}],
            [{"id": -1, "content": "x"}],
            [
                {
                    "id": 2**31,
                    "content": "x",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
        ),
        "truncation": (7, {"max_length": -1}),
        "padding": (7, {"strategy": "x"}),
        "version": (7, "99.0"),
        "normalizer": (7, {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    }.items():
        for value in values:
            yield Attack(
                "broken tokenizer files",
                f"tokenizer.json {key} {str(value)[:50]}",
                edited("tokenizer.json", **{key: value}),
            )
    for key, values in {
        "tokenizer_class": ("nonsense", 7, "BertTokenizer", "os.system", []),
        "model_max_length": (-1, "x", 1, 10**40),
        "added_tokens_decoder": (7, {"x": {}}, {"0": {"content": 7}}, {"-1": {"content": "x"}}),
        "eos_token": (7, [], {"content": 7}, "not there"),
        "pad_token": (7, {}, None),
        "chat_template": (7, [], {"a": "b"}, [{"name": "x", "template": "{{"}]),
        "padding_side": ("up", 7),
        "extra_special_tokens": (7, {"a": 7}),
        "clean_up_tokenization_spaces": ("x", 7),
        "fix_mistral_regex": (7, True),
        "backend": ("os", 7),
    }.items():
        for value in values:
            yield Attack(
                "broken tokenizer files",
                f"tokenizer_config.json {key} {str(value)[:40]}",
                edited("tokenizer_config.json", **{key: value}),
            )
    for key, values in {
        "eos_token_id": (-5, 10**12, "x", {}, [[]], True, None),
        "temperature": ("x", -1, float("nan")),
        "max_length": (-1, "x", 10**40),
        "do_sample": ("x", 7),
        "top_k": (-1, "x"),
        "bos_token_id": ("x", [], -7),
        "transformers_version": (7, []),
    }.items():
        for value in values:
            yield Attack(
                "generation_config.json", f"{key} {str(value)[:40]}", edited("generation_config.json", **{key: value})
            )
    for title, template in TEMPLATES.items():
        endless = title in (
            "two loops without end",
            "a macro in itself",
            "10**10 characters",
            "doubling",
            "padding",
            "a format",
        )
        yield Attack("chat templates", title, written("chat_template.jinja", template), SAMPLES if endless else ANY)
