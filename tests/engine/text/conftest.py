"""The default model's record, read once: its digest covers every byte of the weights."""

import pytest

from baton.config.fleet_file import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from baton.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def default_artifact():
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def metadata(default_artifact) -> dict:
    source = default_artifact.tokenizer
    assert isinstance(source, dict)
    return source


@pytest.fixture(scope="session")
def gemma_tokenizer(gemma):
    """Gemma 3's, which takes two seconds."""
    return load_tokenizer(gemma.tokenizer)


@pytest.fixture(scope="session")
def smollm(metadata):
    return load_tokenizer(metadata)
