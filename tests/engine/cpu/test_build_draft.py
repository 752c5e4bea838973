"""A draft model beside the main one: loaded, checked against it, and turned off when it is bad."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.speculative.proposers import SpeculationSettings
from baton.engine.cpu.build import build_draft
from baton.engine.settings import EngineSettings
from baton.model.artifact import ModelArtifact, ModelError, resolve_model
from baton.text.tokenizer import load_tokenizer
from baton.text.vocabulary_match import check_same_vocabulary
from tests.engine.conftest import MODEL
from tests.engine.core.test_draft_proposer import Draft
from tests.engine.loading.test_loading import write_directory


def tokenizer_json(artifact: ModelArtifact) -> str:
    """A model's tokenizer as a ``tokenizer.json``."""
    backend = load_tokenizer(artifact.tokenizer).backend
    return str(backend.to_str())


@pytest.fixture(scope="module")
def vocabulary(artifact: ModelArtifact) -> str:
    return tokenizer_json(artifact)


def random_draft(folder: Path, vocabulary: str, vocab_size: int = 49_152) -> Path:
    write_directory(folder, shards=1, vocab_size=vocab_size)
    (folder / "tokenizer.json").write_text(vocabulary)
    return folder


def test_a_draft_of_another_size_is_refused_by_name(
    artifact: ModelArtifact, tmp_path: Path
) -> None:
    draft = resolve_model(str(random_draft(tmp_path / "small", "{}", 200)))
    with pytest.raises(
        ModelError, match=r"small does not fit .*vocabulary has 200 tokens, not 49152"
    ):
        check_same_vocabulary(artifact, draft)


def test_the_same_tokens_in_another_file_format_are_the_same(
    artifact: ModelArtifact, vocabulary: str, tmp_path: Path
) -> None:
    check_same_vocabulary(artifact, resolve_model(str(random_draft(tmp_path / "d", vocabulary))))


def test_a_draft_that_spells_a_token_differently_is_refused(
    artifact: ModelArtifact, vocabulary: str, tmp_path: Path
) -> None:
    described: dict[str, Any] = json.loads(vocabulary)
    words = described["model"]["vocab"]
    one, two = "Ġthe", "Ġof"
    words[one], words[two] = words[two], words[one]
    draft = random_draft(tmp_path / "d", json.dumps(described))
    with pytest.raises(ModelError, match=r"token \d+ is ' (the|of)', but ' (the|of)' in the main"):
        check_same_vocabulary(artifact, resolve_model(str(draft)))


def test_a_missing_draft_is_a_clear_error() -> None:
    settings = EngineSettings(
        model=MODEL, speculation=SpeculationSettings(mode="draft", draft="/nowhere/x.gguf")
    )
    with pytest.raises(ModelError, match=r"/nowhere/x\.gguf"):
        build_draft(settings, Draft().runner, lambda _: None)
