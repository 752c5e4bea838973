"""All model families, by the name in ``ModelConfig.family``."""

from collections.abc import Mapping

from baton.engine.models import gemma3, gpt_oss, llama, mistral, qwen2, qwen3, qwen3_moe, smollm3
from baton.engine.models.family import Family, WeightName, weights_of
from baton.model.model_config import ModelConfig

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (llama, mistral, qwen2, qwen3, gemma3, qwen3_moe, smollm3, gpt_oss)
}


def weight_table(config: ModelConfig, file_format: str) -> list[WeightName]:
    """Return every weight that the model needs, in loading order, for a file format."""
    return weights_of(FAMILIES[config.family], config, file_format)
