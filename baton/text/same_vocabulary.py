"""Whether two models mean the same by every token id: a draft model must."""

from baton.model.artifact import ModelArtifact, ModelError
from baton.text.tokenizer import load_tokenizer


def check_same_vocabulary(main: ModelArtifact, draft: ModelArtifact) -> None:
    """A draft token is a token id, so every id must mean the same to both models.

    Raises:
        ModelError: It does not; the message names both models and the first difference.
    """
    names = f"speculation: the draft model {draft.path} does not fit {main.path}"
    sizes = draft.config.vocab_size, main.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ModelError(f"{names}: its vocabulary has {sizes[0]} tokens, not {sizes[1]}")
    if draft.tokenizer_digest == main.tokenizer_digest:
        return
    ours = load_tokenizer(main.tokenizer_source())
    theirs = load_tokenizer(draft.tokenizer_source())
    for token_id in range(sizes[0]):
        if ours.token_bytes(token_id) != theirs.token_bytes(token_id):
            raise ModelError(
                f"{names}: token {token_id} is {theirs.token_text(token_id)!r} to it and "
                f"{ours.token_text(token_id)!r} to the main model"
            )
