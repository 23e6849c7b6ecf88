"""Configurations under which the models of transformers are tiny.

A default configuration is shrunk by the names of its fields alone, in its configurations of parts
too: widths to 64, heads to 4, layers, vocabularies, experts and windows likewise, dropout to 0.
`SPECIAL` holds what some architectures need beyond that, because their fields depend on each other.
"""

from __future__ import annotations

import re
from typing import Any, TypeGuard

from transformers import PretrainedConfig

VOCABULARY = 320
# The first that matches the whole name says how large the number may be.
_MOST: list[tuple[re.Pattern[str], int]] = [
    (re.compile(pattern), most)
    for pattern, most in {
        r"num_feat_extract_layers": 100,  # follows from a list, which stays
        r"codebook_size": 256,
        r".*vocab.*size.*|n_vocab|num_embeddings|n_words": VOCABULARY,
        r"(max_.*position|n_positions|n_ctx|max_source|max_target|max_seq|context_length).*": 512,
        r"n_group|topk_group|num_expert_group|first_k_dense_replace": 1,
        r"(.*_)?(num_(.*_)?layers|n_layers?|layers|depth|num_(hidden_)?blocks)": 2,
        r"num_experts_per_tok(en)?|num_selected_experts|(moe_|router_)?top_?k(_experts)?|moe_k": 2,
        r"num_.*experts|n_(routed_)?experts": 4,
        r"rotary_dim": 8,
        r"image_size|input_size": 64,
        r"(.*_)?(head_dim|kv_channels|(attention_)?head_size|d_kv)": 16,
        r".*(mamba|linear|ssm).*_heads": 8,
        r"(.*_)?(num_(.*_)?heads?|n_heads?|heads)": 4,
        r"(.*_)?(hidden_size|d_model|n_embd|(embed|embedding|hidden|projection|output|conv)_dim"
        r"|dim|embedding_size|out_hidden_size|hidden_channels|width|channels|lru_width|d_inner"
        r"|entity_emb_size|q_lora_rank|kv_lora_rank)": 64,
        r"(.*_)?(.*intermediate.*|(ffn|mlp|inner|ff)_dim|d_ff|n_inner|ffn_hidden_size)": 128,
        r".*(state_size|d_state|state_dim|chunk_size|sliding_window|attention_window).*": 16,
        r".*num_queries.*": 10,
    }.items()
]
_DEPTHS = ("depths", "layer_depths", "num_blocks", "decoder_depths")
_WIDTHS = re.compile(r".*(hidden_sizes|embed_dims|hidden_dims|dims|channels|conv_dim|widths).*")
_DROPPED = re.compile(r".*(drop|mask_time_prob|mask_feature_prob|noise|jitter).*")
# timm is another package: its backbones give way to one that transformers has.
_BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
# What cannot be built without; and as many layers as it takes to have one of each kind.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "jamba": {"num_hidden_layers": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "mistral4": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "recurrent_gemma": {"num_hidden_layers": 3},
}


def tiny_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """The default configuration of a class, shrunk."""
    return config_class(**_shrunk(config_class()))


def _shrunk(config: PretrainedConfig) -> dict[str, Any]:
    """The fields of a configuration that become smaller."""
    fields: dict[str, Any] = {n: v for n, v in vars(config).items() if not n.startswith("_")}
    small: dict[str, Any] = {}
    ids = 0
    for name, value in fields.items():
        if isinstance(value, PretrainedConfig):
            if value.model_type in ("timm_backbone", "timm_wrapper"):
                small |= {name: _BACKBONE, "use_timm_backbone": False}
            else:
                kind = {"model_type": value.model_type} if value.model_type else {}
                small[name] = _shrunk(value) | kind
        elif name == "rope_parameters" and "rope_theta" in (value or {}):
            # Half of a head of 16. Who has no sections does not read them.
            small[name] = value | {"mrope_section": [2, 3, 3]}
        elif isinstance(value, float) and _DROPPED.fullmatch(name):
            small[name] = 0.0
        elif _is_whole(value) and name.endswith(("_id", "_ids", "_token_index")):
            # Special tokens lie at the end, where no batch meets them by chance.
            if value >= VOCABULARY - 32:
                ids += 1
                small[name] = VOCABULARY - ids
        elif _is_whole(value) and (most := _most(name)) is not None:
            small[name] = min(value, most)
        elif isinstance(value, list | tuple) and value and all(map(_is_whole, value)):
            if name in _DEPTHS:
                small[name] = [1] * len(value)
            elif name == "eos_token_id":
                small[name] = 2
            elif _WIDTHS.fullmatch(name) and all(each % 4 == 0 and each >= 16 for each in value):
                small[name] = [each // 4 for each in value]
    # Keys and values have as many heads as the queries, or half of them.
    if fields.get("num_key_value_heads") not in (None, fields.get("num_attention_heads")):
        small["num_key_value_heads"] = min(fields["num_key_value_heads"], 2)
    if isinstance(fields.get("num_heads"), list | tuple) and "embed_dim" in small:
        small["embed_dim"] = 16 * fields["num_heads"][0]  # the width of the first stage
    if fields.get("use_cache") is True:
        small["use_cache"] = False
    if fields.get("prediction_length", 0) is None:
        small["prediction_length"] = 8
    special = SPECIAL.get(type(config).__module__.split(".")[-2], {})
    return small | {name: value for name, value in special.items() if name in fields}


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _most(name: str) -> int | None:
    return next((most for pattern, most in _MOST if pattern.fullmatch(name)), None)
