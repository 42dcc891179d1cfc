"""Every card against the table of architectures, through transformers' own configuration classes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from slimectl.architectures import cards
from slimectl.architectures.config import head_dim, rope, with_defaults
from slimectl.architectures.config_defaults import STAND_INS
from slimectl.architectures.registry import Parameters, family_of, parameters
from slimectl.errors import CheckpointError, SettingsError
from slimectl.planner import plan
from slimectl.planner.search import fitting
from slimectl.planner.workload import GIB, Run

MODELS = """
model                    L  hidden ffn   heads groups head_dim base     rot  vocab  eps   tied qk_norm qkv_bias
deepseek-v3-20layer      20 7168   18432 128   -      128      10000    1.0  129280 1e-6  no   y       n
deepseek-v3-5layer       5  7168   18432 128   -      128      10000    1.0  129280 1e-6  no   y       n
deepseek-v3              61 7168   18432 128   -      128      10000    1.0  129280 1e-6  no   y       n
gemma3-1b                26 1152   6912  4     1      256      1000000  1.0  262144 1e-6  yes  y       n
gemma3-270m              18 640    2048  4     1      256      1000000  1.0  262144 1e-6  yes  y       n
glm4-32B                 64 6144   23040 48    8      128      10000    0.5  151552 1e-5  no   n       n
glm4-9B                  40 4096   13696 32    2      128      10000    0.5  151552 1e-5  no   n       y
glm4.5-106B-A12B         46 4096   10944 96    8      128      1000000  0.5  151552 1e-5  no   n       y
glm4.5-355B-A32B         92 5120   12288 96    8      128      1000000  0.5  151552 1e-5  no   y       y
glm4.7-30B-A3B           47 2048   10240 20    -      192      1000000  1.0  154880 1e-5  no   y       y
glm5-744B-A40B           78 6144   12288 64    -      192      1000000  1.0  154880 1e-5  no   y       n
glm5.2-744B-A40B         78 6144   12288 64    -      192      8000000  1.0  154880 1e-5  no   y       n
gpt-oss-120b             36 2880   2880  64    8      64       150000   1.0  201088 1e-5  no   n       y
gpt-oss-20b              24 2880   2880  64    8      64       150000   1.0  201088 1e-5  no   n       y
kimi-k2-thinking         61 7168   18432 64    -      64       50000    1.0  163840 1e-5  no   y       n
kimi-k2                  61 7168   18432 64    -      64       50000    1.0  163840 1e-6  no   y       n
llama3-70B               80 8192   28672 64    8      128      500000   1.0  128256 1e-5  no   n       n
llama3-8B                32 4096   14336 32    8      128      500000   1.0  128256 1e-5  no   n       n
llama3.1-8B-Instruct     32 4096   14336 32    8      128      500000   1.0  128256 1e-5  no   n       n
llama3.2-3B-Instruct-amd 28 3072   8192  24    8      128      500000   1.0  128256 1e-5  yes  n       n
llama3.2-3B-Instruct     28 3072   8192  24    8      128      500000   1.0  128256 1e-5  yes  n       n
mimo-7B-rl               36 4096   11008 32    8      128      640000   1.0  151680 1e-05 no   n       y
minimax-m2               62 3072   1536  48    8      128      5000000  0.5  200064 1e-6  no   y       n
moonlight                27 2048   11264 16    -      128      50000    1.0  163840 1e-5  no   y       n
qwen2.5-0.5B             24 896    4864  14    2      64       1000000  1.0  151936 1e-6  yes  n       y
qwen2.5-1.5B             28 1536   8960  12    2      128      10000    1.0  151936 1e-6  yes  n       y
qwen2.5-32B              64 5120   27648 40    8      128      1000000  1.0  152064 1e-5  no   n       y
qwen2.5-3B               36 2048   11008 16    2      128      1000000  1.0  151936 1e-6  yes  n       y
qwen2.5-7B               28 3584   18944 28    4      128      1000000  1.0  152064 1e-06 no   n       y
qwen3-0.6B               28 1024   3072  16    8      128      1000000  1.0  151936 1e-6  yes  y       n
qwen3-1.7B               28 2048   6144  16    8      128      1000000  1.0  151936 1e-6  yes  y       n
qwen3-14B                40 5120   17408 40    8      128      1000000  1.0  151936 1e-6  no   y       n
qwen3-235B-A22B          94 4096   12288 64    4      128      1000000  1.0  151936 1e-6  no   y       n
qwen3-30B-A3B            48 2048   6144  32    4      128      1000000  1.0  151936 1e-6  no   y       n
qwen3-32B                64 5120   25600 64    8      128      1000000  1.0  151936 1e-6  no   y       n
qwen3-4B-Instruct-2507   36 2560   9728  32    8      128      5000000  1.0  151936 1e-6  yes  y       n
qwen3-4B                 36 2560   9728  32    8      128      1000000  1.0  151936 1e-6  yes  y       n
qwen3-8B                 36 4096   12288 32    8      128      1000000  1.0  151936 1e-6  no   y       n
qwen3-next-80B-A3B       48 2048   5120  16    2      256      10000000 0.25 151936 1e-6  no   y       n
qwen3-vl-4B              36 2560   9728  32    8      128      5000000  1.0  151936 1e-6  yes  y       n
qwen3.5-0.8B             24 1024   3584  8     2      256      10000000 0.25 248320 1e-6  yes  y       n
qwen3.5-27B              64 5120   17408 24    4      256      10000000 0.25 248320 1e-6  no   y       n
qwen3.5-35B-A3B-vl       40 2048   512   16    2      256      10000000 0.25 248320 1e-6  no   y       n
qwen3.5-35B-A3B          40 2048   512   16    2      256      10000000 0.25 248320 1e-6  no   y       n
qwen3.5-4B               32 2560   9216  16    4      256      10000000 0.25 248320 1e-6  yes  y       n
qwen3.5-9B               32 4096   12288 16    4      256      10000000 0.25 248320 1e-6  no   y       n
"""

MIXTURES = """
model               dense moe experts moe_ffn topk shared_ffn score   pre bias groups group_topk topk_scale
deepseek-v3-20layer 3     17  256     2048    8    2048       sigmoid y   y    8      4          2.5
deepseek-v3-5layer  3     2   256     2048    8    2048       sigmoid y   y    8      4          2.5
deepseek-v3         3     58  256     2048    8    2048       sigmoid y   y    8      4          2.5
glm4.5-106B-A12B    1     45  128     1408    8    1408       sigmoid y   y    -      -          -
glm4.5-355B-A32B    3     89  160     1536    8    1536       sigmoid y   y    -      -          2.5
glm4.7-30B-A3B      1     46  64      1536    4    1536       sigmoid y   y    -      -          1.8
glm5-744B-A40B      3     75  256     2048    8    2048       sigmoid y   y    -      -          2.5
glm5.2-744B-A40B    3     75  256     2048    8    2048       sigmoid y   y    -      -          2.5
gpt-oss-120b        0     36  128     2880    4    -          softmax -   -    -      -          -
gpt-oss-20b         0     24  32      2880    4    -          softmax -   -    -      -          -
kimi-k2-thinking    1     60  384     2048    8    2048       sigmoid y   y    1      1          2.827
kimi-k2             1     60  384     2048    8    2048       sigmoid y   y    1      1          2.827
minimax-m2          0     62  256     1536    8    -          sigmoid y   y    -      -          -
moonlight           1     26  64      1408    6    2816       sigmoid y   y    1      1          2.446
qwen3-235B-A22B     0     94  128     1536    8    -          softmax -   -    -      -          -
qwen3-30B-A3B       0     48  128     768     8    -          softmax -   -    -      -          -
qwen3-next-80B-A3B  0     48  512     512     10   512        softmax -   -    -      -          -
qwen3.5-35B-A3B-vl  0     40  256     512     8    512        softmax -   -    -      -          -
qwen3.5-35B-A3B     0     40  256     512     8    512        softmax -   -    -      -          -
"""

LATENT = """
model               q_lora kv_lora qk_dim rope_dim v_dim
deepseek-v3-20layer 1536   512     128    64       128
deepseek-v3-5layer  1536   512     128    64       128
deepseek-v3         1536   512     128    64       128
glm4.7-30B-A3B      768    512     192    64       256
glm5-744B-A40B      2048   512     192    64       256
glm5.2-744B-A40B    2048   512     192    64       256
kimi-k2-thinking    1536   512     128    64       128
kimi-k2             1536   512     128    64       128
moonlight           -      512     128    64       128
"""

STRETCHED = """
model                    factor mscale mscale_all_dim
deepseek-v3-20layer      40     1.0    1.0
deepseek-v3-5layer       40     1.0    1.0
deepseek-v3              40     1.0    1.0
gpt-oss-120b             32.0   -      -
gpt-oss-20b              32.0   -      -
kimi-k2-thinking         64.0   1.0    1.0
kimi-k2                  32.0   1.0    1.0
llama3.1-8B-Instruct     8.0    -      -
llama3.2-3B-Instruct-amd 32.0   -      -
llama3.2-3B-Instruct     32.0   -      -
moonlight                1      1.0    1.0
"""

Row = dict[str, str]


def table(text: str) -> dict[str, Row]:
    header, *lines = text.strip().splitlines()
    return {row["model"]: row for row in (dict(zip(header.split(), line.split(), strict=True)) for line in lines)}


ROWS, MIXTURE, MLA, SCALED = table(MODELS), table(MIXTURES), table(LATENT), table(STRETCHED)
LEARNERS = ("tiny", "tiny-qwen3.5", "tiny-vl", "tiny-vl3")
VISION = ("qwen3-vl-4B",)
"""Models whose images are read, which Megatron-core does not train."""
BIASED, NORMED = ("qwen2", "mimo"), ("qwen3", "qwen3_moe", "qwen3_next", "minimax_m2", "gemma3")
"""Model types whose class has a bias on query, key and value, or normalises query and key, without a key for it."""


def whole(name: str) -> dict[str, Any]:
    return cards.language_model(with_defaults(cards.load(name)["config"]))


def first(config: dict[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def number(text: str) -> float | None:
    return None if text == "-" else float(text)


def test_there_is_a_card_for_every_row_and_four_to_learn_on():
    assert set(cards.names()) == {*ROWS, *LEARNERS}
    assert len(ROWS) == 46


@pytest.mark.parametrize("name", ROWS)
def test_a_card_says_what_the_table_says(name: str):
    row, config = ROWS[name], whole(name)
    kind = config["model_type"].removesuffix("_text").removesuffix("_moe")
    facts = {
        "L": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "ffn": first(config, "intermediate_size", "moe_intermediate_size"),
        "heads": config["num_attention_heads"],
        "groups": config["num_key_value_heads"],
        "base": rope(config).theta,
        "rot": rope(config).percent,
        "vocab": config["vocab_size"],
        "eps": config["rms_norm_eps"],
    }
    # Latent attention has a key-value head for every head, and the table leaves that out.
    expected = {key: number(row[key]) or number(row["heads"]) for key in facts}
    assert facts == expected
    assert config["tie_word_embeddings"] == (row["tied"] == "yes")
    if name in MLA:
        # The table's head dimension is a flag of launch scripts which latent attention does not read.
        assert int(row["head_dim"]) in (config["qk_nope_head_dim"], config["qk_rope_head_dim"])
        assert row["qk_norm"] == "y"
        assert not config["attention_bias"]
        return
    assert head_dim(config) == int(row["head_dim"])
    normed = kind in NORMED or kind.startswith("qwen3") or config.get("use_qk_norm", False)
    assert normed == (row["qk_norm"] == "y")
    assert (config["model_type"] in BIASED or bool(config.get("attention_bias"))) == (row["qkv_bias"] == "y")


def dense_layers(config: dict[str, Any]) -> int:
    kinds = config.get("mlp_layer_types")
    return kinds.count("dense") if kinds else config.get("first_k_dense_replace", 0)


@pytest.mark.parametrize("name", ROWS)
def test_experts_are_those_of_the_table(name: str):
    config = whole(name)
    experts = first(config, "num_local_experts", "n_routed_experts", "num_experts")
    if name not in MIXTURE:
        assert not experts
        return
    row, ffn = MIXTURE[name], first(config, "moe_intermediate_size", "intermediate_size")
    shared = config.get("shared_expert_intermediate_size") or config.get("n_shared_experts", 0) * ffn
    facts = {
        "dense": dense_layers(config),
        "moe": config["num_hidden_layers"] - dense_layers(config),
        "experts": experts,
        "moe_ffn": ffn,
        "topk": config["num_experts_per_tok"],
        "shared_ffn": shared or None,
        "groups": config.get("n_group"),
        "group_topk": config.get("topk_group"),
        "topk_scale": config.get("routed_scaling_factor"),
    }
    defaults = {"groups": facts["groups"] and 1, "group_topk": facts["group_topk"] and 1}
    defaults["topk_scale"] = facts["topk_scale"] and 1.0
    assert facts == {key: number(row[key]) or defaults.get(key, number(row[key])) for key in facts}


@pytest.mark.parametrize("name", MLA)
def test_latent_attention_has_the_dimensions_of_the_table(name: str):
    config, row = whole(name), MLA[name]
    keys = {
        "q_lora": "q_lora_rank",
        "kv_lora": "kv_lora_rank",
        "qk_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
        "v_dim": "v_head_dim",
    }
    assert {key: config[of] for key, of in keys.items()} == {key: number(row[key]) for key in keys}


@pytest.mark.parametrize("name", ROWS)
def test_rope_is_stretched_as_in_the_table(name: str):
    scaling = rope(whole(name)).scaling or {}
    row = SCALED.get(name, {"factor": "1", "mscale": "-", "mscale_all_dim": "-"})
    assert scaling.get("factor", 1.0) == number(row["factor"])
    if scaling:
        assert scaling.get("mscale") == number(row["mscale"])
        assert scaling.get("mscale_all_dim") == number(row["mscale_all_dim"])


def test_what_only_some_rows_say():
    assert whole("glm4-32B")["max_position_embeddings"] == whole("mimo-7B-rl")["max_position_embeddings"] == 32768
    assert whole("llama3.1-8B-Instruct")["max_position_embeddings"] == 131072
    assert whole("mimo-7B-rl")["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("name", cards.names())
def test_the_weight_mapping_is_the_one_that_the_card_names(name: str):
    card = cards.load(name)
    assert family_of(cards.language_model(card["config"])).name == card["family"]


def test_an_unknown_card_is_answered_with_the_nearest():
    with pytest.raises(SettingsError, match=r"^model.card: no card 'qwen3-8c'\. Did you mean qwen3-8B\?$"):
        cards.load("qwen3-8c")


def found(name: str, **changes: Any) -> list[cards.Difference]:
    card = cards.load(name)
    return cards.differences(card, with_defaults({**card["config"], **changes}))


@pytest.mark.parametrize("name", cards.names())
def test_no_card_contradicts_itself(name: str):
    assert found(name) == []


def test_a_difference_is_found_however_it_is_written():
    assert found("qwen3-8B", rope_theta=10000.0) == [("rope_theta", 1000000.0, 10000.0)]
    written_anew = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    assert found("qwen3-8B", **written_anew) == []
    assert found("qwen3-8B", max_position_embeddings=9) == []
    stretched = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    stretched["original_max_position_embeddings"] = 8192
    assert found("gemma3-1b", rope_local_base_freq=20000.0) == [("rope_local_base_freq", 10000.0, 20000.0)]
    assert found("llama3.1-8B-Instruct", rope_scaling=stretched) == [("rope_scaling.high_freq_factor", 4.0, 2.0)]


def test_lists_that_follow_from_a_key_are_compared_too():
    ((key, card, config),) = found("qwen3-next-80B-A3B", full_attention_interval=6)
    assert key == "layer_types"
    assert (
        cards.describe_difference((key, card, config))
        == "layer_types[3] is 'linear_attention', but 'full_attention' in the card"
    )


def test_the_language_model_inside_a_larger_configuration_is_compared():
    outer = with_defaults(cards.load("qwen3.5-35B-A3B-vl")["config"])
    assert cards.differences(cards.load("qwen3.5-35B-A3B"), outer) == []


def test_a_contradiction_is_refused_in_one_line_with_both_values():
    config = with_defaults({**cards.load("qwen3-0.6B")["config"], "rope_theta": 10000.0, "hidden_size": 2048})
    with pytest.raises(CheckpointError) as caught:
        cards.check("qwen3-0.6B", config, location="models/mine")
    assert str(caught.value) == (
        "models/mine: contradicts the card qwen3-0.6B: rope_theta is 10000.0, but 1000000.0 in the card; hidden_size is"
        " 2048, but 1024 in the card. Give the card of this checkpoint, or none. config.json takes precedence."
    )


@pytest.mark.parametrize("name", [name for name in cards.names() if name not in LEARNERS])
def test_parameters_are_those_of_the_model_that_transformers_builds(name: str):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    card = cards.load(name)
    config = card["config"] if name in VISION else cards.language_model(card["config"])
    auto = AutoModelForImageTextToText if name in VISION else AutoModelForCausalLM
    built = AutoConfig.for_model(**{**config, "model_type": STAND_INS.get(config["model_type"], config["model_type"])})
    with torch.device("meta"):
        model = auto.from_config(built)
    sizes = {key: part.numel() for key, part in model.named_parameters() if ".visual." not in key}
    routed = sum(size for key, size in sizes.items() if ".mlp.experts." in key)
    experts = int(MIXTURE[name]["experts"]) if name in MIXTURE else 1
    chosen = routed * int(MIXTURE[name]["topk"]) // experts if name in MIXTURE else 0
    total = sum(sizes.values())
    assert parameters(whole(name)) == Parameters(card["parameters"], card.get("activated", total))
    assert (card["parameters"], card.get("activated", total)) == (total, total - routed + chosen)


@pytest.mark.parametrize("name", MIXTURE)
def test_routing_is_that_of_the_table(name: str):
    row, config = MIXTURE[name], whole(name)
    fields = family_of(config).architecture(config).transformer
    assert fields["moe_router_score_function"] == row["score"]
    assert fields.get("moe_router_enable_expert_bias", False) == (row["bias"] == "y")
    if row["score"] == "sigmoid":
        # mcore scores with a sigmoid before it chooses in any case; for a softmax the flag decides.
        assert row["pre"] == "y"


@pytest.mark.parametrize("name", ROWS)
def test_megatron_is_told_what_the_table_says(name: str):
    row, config = ROWS[name], whole(name)
    fields = family_of(config).architecture(config).transformer
    assert fields["layernorm_epsilon"] == float(row["eps"])
    assert fields["qk_layernorm"] == (row["qk_norm"] == "y")
    if name not in MLA:
        assert fields["add_qkv_bias"] == (row["qkv_bias"] == "y")
        assert fields["kv_channels"] == int(row["head_dim"])


@functools.cache
def model_of(name: str) -> plan.PlannedModel:
    return plan.model_of(whole(name))


@pytest.mark.parametrize("gpus", [8, 64])
@pytest.mark.parametrize("name", [name for name in ROWS if name not in VISION])
def test_suggested_layouts_are_legal_and_fit(name: str, gpus: int):
    card = cards.load(name)
    model, run = model_of(name), Run(gpus)
    suggestion = plan.suggested(card, gpus)
    if suggestion is not None:
        run = replace(run, layout=suggestion[0], recompute=suggestion[1])
        plan.check(model, run)
        assert plan.fits(model, run, 80)
        return
    # bfloat16 weights, float32 gradients and the optimizer's three float32 numbers, all shared out.
    least = 18 * card["parameters"] / gpus
    assert least > 0.9 * 80 * GIB or not any(fitting(model.all, run, batch=256, memory_gib=80))
    assert "do not hold it" in card["layout"][f"gpus_{gpus}"]["note"]


@pytest.mark.parametrize(
    ("alias", "name"),
    [("deepseek-r1", "deepseek-v3"), ("DeepSeek-V3.1", "deepseek-v3"), ("glm4.6", "glm4.5-355B-A32B"),
     ("GLM4.7-355B-A32B", "glm4.5-355B-A32B"), ("glm-z1-9B", "glm4-9B"), ("Qwen3-4B", "qwen3-4B"),
     ("GLM-4.6", "glm4.5-355B-A32B"), ("GLM-4.7", "glm4.5-355B-A32B"), ("GLM-4.7-Flash", "glm4.7-30B-A3B"),
     ("zai-org/GLM-4.6", "glm4.5-355B-A32B"), ("THUDM/GLM-Z1-9B-0414", "glm4-9B"), ("Llama-3-70B", "llama3-70B"),
     ("meta-llama/Meta-Llama-3-70B", "llama3-70B"), ("meta-llama/Llama-3.1-8B", "llama3.1-8B-Instruct"),
     ("deepseek-ai/DeepSeek-R1", "deepseek-v3"), ("deepseek_v3_1", "deepseek-v3"), ("Qwen/Qwen3-4B", "qwen3-4B"),
     ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4B-Instruct-2507"), ("QWEN2.5 7B instruct", "qwen2.5-7B"),
     ("Qwen/Qwen3-VL-4B-Instruct", "qwen3-vl-4B"),
     ("Llama 3 8B", "llama3-8B"), ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8B"),
     ("moonlight-16b", "moonlight"), ("moonshotai/Moonlight-16B-A3B-Instruct", "moonlight"),
     ("Qwen/Qwen3.5-4B", "qwen3.5-4B")],
)  # fmt: skip
def test_a_card_is_found_by_the_names_of_its_other_models(alias: str, name: str):
    assert cards.path_of(alias).stem == name


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("Qwen/Qwen3-40B", "qwen3-4B"),
        ("meta-llama/Llama-3.1-70B", "llama3-70B"),
        ("deepseek-ai/DeepSeek-V4", "deepseek-v3"),
    ],
)
def test_a_model_without_a_card_leads_to_the_nearest(unknown: str, nearest: str):
    with pytest.raises(SettingsError, match=f"no card '{unknown}'. Did you mean {nearest}"):
        cards.path_of(unknown)


def test_every_name_in_any_spelling_means_one_card():
    listed = [alias for name in cards.names() for alias in [name, *cards.load(name).get("aliases", [])]]
    assert len({cards.spelling(each) for each in listed}) == len(listed)
