"""A tiny random vision-language model with the files that the cookbook needs for it."""

import json
from pathlib import Path

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from tinkercloud_testing.small_models.models import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

MARKS = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|im_start|>", "<|im_end|>"),
)
"""Special tokens of the Qwen-VL family, whose ids follow that of the end token."""
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(EOS_TOKEN_ID + 1, EOS_TOKEN_ID + 5)

_TEMPLATE = """
{%- for message in messages %}{{ message.role + ': ' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""

PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 28 * 28,
    "max_pixels": 280 * 280,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def tiny_qwen_vl() -> Qwen2_5_VLForConditionalGeneration:
    """Return a random Qwen2.5-VL, always with the same seed."""
    torch.manual_seed(5)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": None,
            "eos_token_id": EOS_TOKEN_ID,
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
            "initializer_range": 0.15,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "fullatt_block_indexes": [0],
            "window_size": 28,
            "initializer_range": 0.15,
        },
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.eval()
    return model


def save_vision_model(folder: Path) -> Path:
    """Write the model with its chat template and image processor as a Hugging Face folder."""
    tiny_qwen_vl().save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder
