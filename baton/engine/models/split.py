"""How a model is cut over the ranks of a tensor-parallel replica."""

from baton.engine.core.split import Split, splits
from baton.model.model_config import ModelConfig, ModelError


def splits_of(config: ModelConfig, ranks: int) -> list[Split]:
    """Every rank's part of a model.

    Raises:
        ModelError: The model cannot be split that far; the message names why.
    """
    if config.num_experts:
        raise ModelError(f"tensor_parallel = {ranks}: a mixture of experts is not split")
    try:
        return splits(
            ranks,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            feed=config.intermediate_size,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
        )
    except ValueError as error:
        raise ModelError(f"tensor_parallel = {ranks}: {error}") from error
