"""Tiny models of many families, and what the library makes of them.

`tests/end_to_end/test_compatibility.py` proves what `tests.compatibility.tables`
prints.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.compatibility.examples import (
    IMAGE_TOKEN,
    Example,
    of_images,
    of_images_and_prompts,
    of_images_in_texts,
    of_patches_in_texts,
    of_spectra,
    of_texts,
    of_waves,
)
from tests.support.models import VOCABULARY, OfBatches

# Asking for one would import it, and listing them takes a tenth of a second.
_NAMES = frozenset(dir(transformers))

EXACT = "exact"
OWN_PADDING = "the model's own dependence on padding"
NOT_FINITE = "refused: its own gradients of one token are not finite"
# The family has no such model.
MISSING = "-"

CLASSIFIER = "classifier"
RIGHT = "answer tokens, right"
LEFT = "answer tokens, left"
TOKENS = "labels of tokens"
COLUMNS = (CLASSIFIER, RIGHT, LEFT, TOKENS)

# --- settings of several families -----------------------------------------------------

_TOKENS = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDTH = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
_TEXT = {**_TOKENS, **_WIDTH, "max_position_embeddings": 32}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "head_dim": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 6, "num_experts": 3}
_DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 4,
    "max_relative_positions": 16,
    "position_biased_input": False,
    "pooler_hidden_size": 8,
}
SIDES = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 12,
}
"""Sizes of encoders and decoders alike."""
_DECODER = {**_GROUPED, "layer_types": ["full_attention"] * 2}
_IMAGE = {**_WIDTH, "image_size": 8, "patch_size": 4, "num_channels": 3}
_ROTARY = {"rope_type": "default", "mrope_section": [1, 1, 0]}


@dataclass(frozen=True)
class Family:
    """How a family's models are made, and what columns are not "exact".

    The configuration is a class of transformers, without "Config". Names of models
    begin with it too, unless they are given in full. The data type is float32 where the
    model's own attention masks overflow in float64.
    """

    config: str
    settings: Mapping[str, Any]
    models: str
    outcomes: Mapping[str, str] = field(default_factory=dict)
    examples: Callable[[int], list[Example]] = of_texts
    targets: str | list[str] = "all-linear"
    dtype: torch.dtype = torch.float64

    def outcome(self, column: str) -> str:
        """Tell what is expected of a column."""
        if self.model_class(column) is None:
            return MISSING
        return self.outcomes.get(column, EXACT)

    def model_class(self, column: str) -> str | None:
        """Name the class of a column's models; None where the family has none."""
        if column == TOKENS:
            name = f"{self.config}ForTokenClassification"
            return name if name in _NAMES else None
        for name in self.models.split():
            if name.endswith(("LM", "LMHeadModel", "Generation")) != (
                column == CLASSIFIER
            ):
                return name if name in _NAMES else self.config + name
        return None

    def model(self, column: str) -> nn.Module:
        """Make an evaluated model with random weights and adapters of rank 2."""
        torch.manual_seed(0)
        make_config = getattr(transformers, f"{self.config}Config")
        config = make_config(**self.settings, num_labels=3)
        # The other implementations know no float64.
        config._experts_implementation = "eager"
        name = self.model_class(column)
        assert name is not None
        model = getattr(transformers, name)(config)
        # Larger than transformers' own, so that every layer matters to the logits.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
        lora = LoraConfig(
            r=2,
            lora_alpha=4,
            target_modules=self.targets,
            # B would begin at 0, where nothing depends on A.
            init_lora_weights=False,
        )
        model = get_peft_model(model, lora).to(self.dtype).eval()
        if self.examples is of_images_and_prompts:
            return OfBatches(model, "logits_per_image")
        return model


# --- the families ---------------------------------------------------------------------

_SEQUENCE = "ForSequenceClassification"
_BOTH = f"{_SEQUENCE} ForCausalLM"

FAMILIES = {
    "Llama": Family("Llama", _GROUPED, _BOTH),
    "Mistral": Family("Mistral", _GROUPED, _BOTH),
    "Qwen2": Family("Qwen2", _GROUPED, _BOTH),
    "Qwen3": Family("Qwen3", _GROUPED, _BOTH),
    "Gemma": Family("Gemma", _GROUPED, _BOTH),
    "Gemma 2": Family("Gemma2", _GROUPED, _BOTH, dtype=torch.float32),
    "Gemma 3": Family("Gemma3Text", _GROUPED, f"{_SEQUENCE} Gemma3ForCausalLM"),
    "Phi-3": Family("Phi3", _GROUPED, _BOTH),
    "SmolLM3": Family("SmolLM3", _GROUPED, _BOTH),
    "GLM-4": Family("Glm4", _GROUPED, _BOTH),
    "OLMo 2": Family("Olmo2", _GROUPED, _BOTH),
    "Granite": Family("Granite", _GROUPED, "ForCausalLM"),
    "Cohere 2": Family("Cohere2", _GROUPED, "ForCausalLM"),
    "GPT-2": Family("GPT2", _TEXT, f"{_SEQUENCE} LMHeadModel"),
    "GPT-NeoX": Family("GPTNeoX", {**_TEXT, "rotary_pct": 1.0}, _BOTH),
    "GPT-J": Family("GPTJ", {**_TEXT, "rotary_dim": 2}, _BOTH),
    "OPT": Family("OPT", {**_TEXT, "ffn_dim": 12, "word_embed_proj_dim": 8}, _BOTH),
    "BLOOM": Family("Bloom", _TEXT, _BOTH, dtype=torch.float32),
    "Falcon": Family("Falcon", _TEXT, _BOTH),
    "Mamba": Family(
        "Mamba",
        {**_TOKENS, **_WIDTH, "state_size": 4},
        "ForCausalLM",
        # PEFT refuses out_proj.
        targets=["in_proj", "x_proj"],
    ),
    "Zamba 2": Family(
        "Zamba2",
        {
            **_TEXT,
            "mamba_d_state": 4,
            "n_mamba_heads": 4,
            "mamba_headdim": 4,
            "chunk_size": 4,
            "num_key_value_heads": 2,
            "mamba_ngroups": 1,
            "hybrid_layer_ids": [1],
            "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
            "adapter_rank": 4,
            "use_mem_rope": False,
        },
        _BOTH,
    ),
    "BERT": Family("Bert", _TEXT, _SEQUENCE),
    "RoBERTa": Family("Roberta", _TEXT, _SEQUENCE),
    "RoBERTa as decoder": Family(
        "Roberta", {**_TEXT, "is_decoder": True}, "ForCausalLM"
    ),
    "DistilBERT": Family("DistilBert", {**_TEXT, "hidden_dim": 12}, _SEQUENCE),
    "DeBERTa-v2": Family(
        "DebertaV2", {**_TEXT, **_DEBERTA, "share_att_key": False}, _SEQUENCE
    ),
    "DeBERTa-v3": Family(
        "DebertaV2", {**_TEXT, **_DEBERTA, "share_att_key": True}, _SEQUENCE
    ),
    "ELECTRA": Family("Electra", {**_TEXT, "embedding_size": 8}, _SEQUENCE),
    "ALBERT": Family("Albert", {**_TEXT, "embedding_size": 8}, _SEQUENCE),
    "ModernBERT": Family("ModernBert", {**_TEXT, "cls_token_id": 1}, _SEQUENCE),
    "ModernBERT as decoder": Family(
        "ModernBertDecoder", {**_TEXT, "cls_token_id": 1}, _BOTH
    ),
    "XLNet": Family(
        "XLNet",
        {**_TOKENS, "d_model": 8, "n_layer": 2, "n_head": 2, "d_inner": 12},
        _SEQUENCE,
        # It wants padding on the left.
        outcomes={CLASSIFIER: OWN_PADDING},
    ),
    "Longformer": Family(
        "Longformer",
        {**_TEXT, "attention_window": 4},
        _SEQUENCE,
        # No token has global attention.
        outcomes={TOKENS: NOT_FINITE},
    ),
    "T5": Family(
        "T5",
        {
            **_TOKENS,
            "d_model": 8,
            "d_kv": 4,
            "d_ff": 12,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        f"{_SEQUENCE} ForConditionalGeneration",
    ),
    "BART": Family(
        "Bart",
        {
            **_TOKENS,
            **SIDES,
            "d_model": 8,
            "max_position_embeddings": 32,
            "decoder_start_token_id": 2,
        },
        f"{_SEQUENCE} ForConditionalGeneration",
    ),
    "T5Gemma": Family(
        "T5Gemma",
        {
            **_TOKENS,
            "encoder": _DECODER,
            "decoder": {**_DECODER, "cross_attention_hidden_size": 8},
            "is_encoder_decoder": True,
            "decoder_start_token_id": 1,
        },
        "ForConditionalGeneration",
    ),
    "Mixtral": Family("Mixtral", {**_GROUPED, "num_local_experts": 3}, _BOTH),
    "Mixtral, attention alone": Family(
        "Mixtral",
        {**_GROUPED, "num_local_experts": 3},
        _BOTH,
        targets=["q_proj", "k_proj", "v_proj", "o_proj"],
    ),
    "Qwen2-MoE": Family(
        "Qwen2Moe",
        {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 6},
        _BOTH,
    ),
    "Qwen3-MoE": Family("Qwen3Moe", {**_GROUPED, **_EXPERTS}, _BOTH),
    "DeepSeek-V3": Family(
        "DeepseekV3",
        {
            **_TEXT,
            **_EXPERTS,
            "num_key_value_heads": 2,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 6,
            "kv_lora_rank": 6,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
        },
        _BOTH,
    ),
    "GPT-OSS": Family(
        "GptOss", {**_DECODER, "num_local_experts": 3, "num_experts_per_tok": 2}, _BOTH
    ),
    "ViT": Family("ViT", _IMAGE, "ForImageClassification", examples=of_images),
    "Swin": Family(
        "Swin",
        {
            "image_size": 16,
            "patch_size": 2,
            "window_size": 4,
            "embed_dim": 8,
            "depths": [2, 1],
            "num_heads": [2, 2],
        },
        "ForImageClassification",
        examples=partial(of_images, shape=(3, 16, 16)),
    ),
    "TimeSformer": Family(
        "Timesformer",
        {**_IMAGE, "num_frames": 2},
        "ForVideoClassification",
        examples=partial(of_images, shape=(2, 3, 8, 8)),
    ),
    "Whisper": Family(
        "Whisper",
        {
            **_TOKENS,
            **SIDES,
            "d_model": 8,
            "num_mel_bins": 4,
            "classifier_proj_size": 6,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "decoder_start_token_id": 1,
        },
        "ForAudioClassification",
        examples=of_spectra,
    ),
    "Wav2Vec2": Family(
        "Wav2Vec2",
        {
            **_WIDTH,
            "conv_dim": (8, 8),
            "conv_stride": (4, 4),
            "conv_kernel": (4, 4),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "classifier_proj_size": 6,
        },
        _SEQUENCE,
        examples=of_waves,
    ),
    "CLIP, texts as classes": Family(
        "CLIP",
        {
            "text_config": {**_TEXT, "projection_dim": 6},
            "vision_config": {**_IMAGE, "projection_dim": 6},
            "projection_dim": 6,
        },
        "CLIPModel",
        examples=of_images_and_prompts,
    ),
    "LLaVA": Family(
        "Llava",
        {
            "text_config": {"model_type": "llama", **_TEXT},
            "vision_config": {"model_type": "clip_vision_model", **_IMAGE},
            "image_token_id": IMAGE_TOKEN,
            "image_seq_length": 4,
        },
        "ForConditionalGeneration",
        examples=of_images_in_texts,
    ),
    "Qwen2.5-VL": Family(
        "Qwen2_5_VL",
        {
            "text_config": {
                **_TEXT,
                "num_key_value_heads": 1,
                "rope_scaling": _ROTARY,
                "rope_parameters": _ROTARY,
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 8,
                "intermediate_size": 12,
                "num_heads": 2,
                "patch_size": 2,
                "spatial_merge_size": 2,
                "temporal_patch_size": 1,
                "window_size": 8,
                "out_hidden_size": 8,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": IMAGE_TOKEN,
            "vision_start_token_id": 5,
            "vision_end_token_id": 6,
        },
        "ForConditionalGeneration",
        examples=of_patches_in_texts,
    ),
}
