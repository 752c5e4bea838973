"""A small random Llama whose tokens are bytes, so that grammars can be followed with it."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.engine.tiny_llama import write_llama


def write_tiny(folder: Path) -> str:
    """Write the model with 6 heads, 3 KV heads; returns the reference to load it by."""
    reference = write_llama(folder, heads=6, kv_heads=3)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: 3 + i for i, c in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return reference
