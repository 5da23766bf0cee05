"""Tiny models of many families, with random weights and adapters in every linear layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from tests.support.models import CLASS_TOKEN_IDS, N_CLASSES, VOCABULARY, ragged_batches

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDTH = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
_TEXT = {**_TOKENS, **_WIDTH, "max_position_embeddings": 32}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "head_dim": 4}
_GPT = {**_TOKENS, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 6, "num_experts": 3}
_DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 4,
    "max_relative_positions": 16,
    "position_biased_input": False,
    "pooler_hidden_size": 8,
}
_IMAGE = {**_WIDTH, "image_size": 8, "patch_size": 4, "num_channels": 3}
_SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 1],
    "num_heads": [2, 2],
    "window_size": 4,
}
_MOBILE_VIT = {
    "image_size": 32,
    "hidden_sizes": [8, 8, 8],
    "neck_hidden_sizes": [4, 4, 4, 4, 4, 4, 8],
    "num_attention_heads": 2,
    "mlp_ratio": 1.0,
    "num_hidden_layers": 1,
}
_WHISPER = {
    "d_model": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 12,
    "num_mel_bins": 4,
    "max_source_positions": 8,
    "max_target_positions": 16,
    "classifier_proj_size": 6,
}
_WAV2VEC2 = {
    **_WIDTH,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (4, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 6,
}


class Family(NamedTuple):
    """What a family's models are made of.

    Attributes
    ----------
    name : str
        of its configuration's class, without "Config"
    settings : mapping
        of the configuration
    classifier, language_model : str or None
        classes of models
    """

    name: str
    settings: Mapping[str, Any]
    classifier: str | None = None
    language_model: str | None = None


def _family(name: str, settings: Mapping[str, Any], *heads: str) -> Family:
    kinds = {"Classification": None, "LM": None}
    for head in heads:
        kinds["Classification" if head.endswith("Classification") else "LM"] = name + head
    return Family(name, settings, kinds["Classification"], kinds["LM"])


_BOTH = ("ForSequenceClassification", "ForCausalLM")
_SEQUENCE = "ForSequenceClassification"

FAMILIES = {
    "Llama": _family("Llama", _GROUPED, *_BOTH),
    "Mistral": _family("Mistral", _GROUPED, *_BOTH),
    "Qwen2": _family("Qwen2", _GROUPED, *_BOTH),
    "Qwen3": _family("Qwen3", _GROUPED, *_BOTH),
    "Gemma": _family("Gemma", _GROUPED, *_BOTH),
    "Gemma 2": _family("Gemma2", _GROUPED, *_BOTH),
    "Gemma 3": Family(
        "Gemma3Text", _GROUPED, "Gemma3TextForSequenceClassification", "Gemma3ForCausalLM"
    ),
    "Phi-3": _family("Phi3", _GROUPED, *_BOTH),
    "GPT-2": _family("GPT2", _GPT, "ForSequenceClassification", "LMHeadModel"),
    "GPT-NeoX": _family("GPTNeoX", {**_TEXT, "rotary_pct": 1.0}, *_BOTH),
    "GPT-J": _family("GPTJ", {**_GPT, "rotary_dim": 2}, *_BOTH),
    "OPT": _family("OPT", {**_TEXT, "ffn_dim": 12, "word_embed_proj_dim": 8}, *_BOTH),
    "BLOOM": _family("Bloom", {**_TOKENS, "hidden_size": 8, "n_layer": 2, "n_head": 2}, *_BOTH),
    "Falcon": _family("Falcon", _TEXT, *_BOTH),
    "Mamba": _family("Mamba", {**_TOKENS, **_WIDTH, "state_size": 4}, "ForCausalLM"),
    "BERT": _family("Bert", _TEXT, _SEQUENCE),
    "RoBERTa": _family("Roberta", _TEXT, _SEQUENCE),
    "RoBERTa as decoder": _family("Roberta", {**_TEXT, "is_decoder": True}, "ForCausalLM"),
    "DistilBERT": _family(
        "DistilBert",
        {**_TOKENS, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12},
        _SEQUENCE,
    ),
    "DeBERTa-v2": _family("DebertaV2", {**_TEXT, **_DEBERTA, "share_att_key": False}, _SEQUENCE),
    "DeBERTa-v3": _family("DebertaV2", {**_TEXT, **_DEBERTA, "share_att_key": True}, _SEQUENCE),
    "ELECTRA": _family("Electra", {**_TEXT, "embedding_size": 8}, _SEQUENCE),
    "ALBERT": _family("Albert", {**_TEXT, "embedding_size": 8}, _SEQUENCE),
    "ModernBERT": _family("ModernBert", {**_TEXT, "cls_token_id": 1}, _SEQUENCE),
    "XLNet": _family(
        "XLNet", {**_TOKENS, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 12}, _SEQUENCE
    ),
    "Longformer": _family("Longformer", {**_TEXT, "attention_window": 4}, _SEQUENCE),
    "T5": _family(
        "T5",
        {**_TOKENS, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2},
        _SEQUENCE,
        "ForConditionalGeneration",
    ),
    "BART": _family(
        "Bart",
        {
            **_TOKENS,
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 12,
            "decoder_ffn_dim": 12,
            "max_position_embeddings": 32,
            "decoder_start_token_id": 2,
        },
        _SEQUENCE,
        "ForConditionalGeneration",
    ),
    "Mixtral": _family("Mixtral", {**_GROUPED, "num_local_experts": 3}, *_BOTH),
    "Qwen2-MoE": _family(
        "Qwen2Moe", {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 6}, *_BOTH
    ),
    "GPT-OSS": _family(
        "GptOss",
        {
            **_GROUPED,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention"] * 2,
        },
        *_BOTH,
    ),
    "ViT": _family("ViT", _IMAGE, "ForImageClassification"),
    "Swin": _family("Swin", _SWIN, "ForImageClassification"),
    "MobileViT": _family("MobileViT", _MOBILE_VIT, "ForImageClassification"),
    "TimeSformer": _family("Timesformer", {**_IMAGE, "num_frames": 2}, "ForVideoClassification"),
    "Whisper": _family("Whisper", {**_WHISPER, **_TOKENS}, "ForAudioClassification"),
    "Wav2Vec2": _family("Wav2Vec2", _WAV2VEC2, _SEQUENCE),
}


_VISION = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
