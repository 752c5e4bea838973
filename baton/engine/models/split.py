"""Tensor-parallel division of a model."""

from dataclasses import replace

from baton.engine.core.split import Split, splits
from baton.model.model_config import ModelConfig, ModelError


def local_config(config: ModelConfig, split: Split) -> ModelConfig:
    """Return the numbers of one rank's part of a model."""
    return replace(
        config,
        num_heads=len(split.heads),
        num_kv_heads=len(split.kv_heads),
        intermediate_size=len(split.feed),
    )


def splits_of(config: ModelConfig, ranks: int) -> list[Split]:
    """Return every rank's part of a model; raise ``ModelError`` if there are too many ranks."""
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
