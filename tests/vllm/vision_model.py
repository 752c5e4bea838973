"""A small Idefics3 with random weights, the architecture of SmolVLM, beside `places.MODEL`.

SmolVLM itself and Qwen2.5-VL need torchvision for videos, which vLLM's environment here lacks.
"""

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration

from tests.vllm.places import MODEL

TILE_PIXELS = 64  # width and height of a tile; larger images have several
TILE_TOKENS = 16
VOCABULARY = 49_216
_SPREAD = 0.15  # with less, all answers are alike
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_SPECIAL = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_TILES]
_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}\
{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}\
{% endfor %}<|im_end|>
{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_vision_model(folder: Path) -> None:
    """Write the model, its tokenizer, and its processor as a Hugging Face directory."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=2,
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": TILE_PIXELS,
            "patch_size": 8,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 8192,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "tie_word_embeddings": False,
        },
    )
    model = Idefics3ForConditionalGeneration(config).to(torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, _SPREAD)
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"longest_edge": 2 * TILE_PIXELS},
        "max_image_size": {"longest_edge": TILE_PIXELS},
        "do_image_splitting": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pad": True,
        "resample": 1,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    named = {"processor_class": "Idefics3Processor", "image_seq_len": TILE_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(named))
