"""Check that a draft model and its main model have the same vocabulary."""

from baton.model.artifact import ModelArtifact, ModelError
from baton.text.tokenizer import load_tokenizer


def check_same_vocabulary(main: ModelArtifact, draft: ModelArtifact) -> None:
    """Raise ``ModelError`` unless every token id has the same text in both models."""
    names = f"speculation: the draft model {draft.path} does not fit {main.path}"
    size = main.config.vocab_size
    if draft.config.vocab_size != size:
        raise ModelError(f"{names}: vocabulary has {draft.config.vocab_size} tokens, not {size}")
    if draft.tokenizer_digest == main.tokenizer_digest:
        return
    ours = load_tokenizer(main.tokenizer)
    theirs = load_tokenizer(draft.tokenizer)
    for token_id in range(size):
        if ours.token_bytes(token_id) != theirs.token_bytes(token_id):
            raise ModelError(
                f"{names}: token {token_id} is {theirs.token_text(token_id)!r}, but "
                f"{ours.token_text(token_id)!r} in the main model"
            )
