"""Loading a draft model: a small model of the same vocabulary, with a KV pool of its own."""

from collections.abc import Callable

import torch

from engine.core.drafting import DraftProposer
from engine.core.speculation import Speculation
from engine.ipc import EngineSettings
from engine.loading import load_model
from engine.numerics import Numerics
from engine.runner import TorchRunner, attention_layout, geometry_of
from engine.text.artifact import ModelArtifact, ModelError, resolve_model
from engine.text.tokenizer import load_tokenizer


def open_draft(
    settings: EngineSettings, num_blocks: int, progress: Callable[[str], None]
) -> Speculation:
    """Load the draft model that the settings name, beside the main one.

    Its KV pool has as many blocks as the main pool (``num_blocks``); they are smaller as the model
    is.

    Raises:
        ModelError: It cannot be loaded, or its tokens are not those of the main model.
        NumericsSetupError: ``exact`` cannot be kept for it on this machine.
    """
    progress(f"looking for the draft model {settings.speculation.draft}")
    main, draft = resolve_model(settings.model), resolve_model(settings.speculation.draft)
    check_same_tokens(main, draft)
    numerics: Numerics = "fast" if settings.numerics == "fast" else "exact"
    with torch.inference_mode():
        model = load_model(draft, settings.dtype, numerics)
        layout = attention_layout(draft, settings.dtype, numerics)
    geometry = geometry_of(draft, settings.dtype, num_blocks)
    pool = bytearray(geometry.pool_bytes)
    runner = TorchRunner(model, pool, geometry, layout, main.config.eos_token_ids)
    return Speculation(DraftProposer(runner), settings.speculation.tokens)


def check_same_tokens(main: ModelArtifact, draft: ModelArtifact) -> None:
    """A guess is a token id, so every id must mean the same to both models.

    Raises:
        ModelError: It does not; the message names both models and the first difference.
    """
    names = f"speculation: the draft model {draft.path} does not fit {main.path}"
    sizes = draft.config.vocab_size, main.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ModelError(f"{names}: its vocabulary has {sizes[0]} tokens, not {sizes[1]}")
    if draft.tokenizer_digest == main.tokenizer_digest:
        return
    ours, theirs = load_tokenizer(main.tokenizer_source()), load_tokenizer(draft.tokenizer_source())
    for token_id in range(sizes[0]):
        if ours.token_bytes(token_id) != theirs.token_bytes(token_id):
            raise ModelError(
                f"{names}: token {token_id} is {theirs.token_text(token_id)!r} to it and "
                f"{ours.token_text(token_id)!r} to the main model"
            )
