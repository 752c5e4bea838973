"""Encoding with `fastokens`, ten times as fast as `tokenizers`, if both give the same ids.

`tokenizers` is the reference: `fastokens` is used only if it agrees on `_probes`, and texts that it
rejects are encoded by `tokenizers`.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import fastokens
from tokenizers import Tokenizer

from baton.types.errors import InvalidRequestError

# Raised for unknown kinds of tokenizers and for texts such as a byte without a token.
REFUSALS = (ValueError, RuntimeError)
_HARD = (
    "",
    " ",
    "Hello, world!  It's 12,345.67 o'clock\r\n\tdon't WE'LL  \n\n\n x",
    "a\u0301 e\u0301 \u1100\u1161 \uff71 \ufb01 \u0130 \u017f \u212a Ⅻ ǅ ² ½ ١٢٣ ß \u0378",
    "中文 日本語 한국어 עברית العربية हिन्दी ไทย \U00013000",
    "😀👨\u200d👩\u200d👧\u00a0\u2028\ufeff\ufffd\x00\x7f\U0010ffff",
    "    def f(x):\n        return x**2  # ___ ... !!! <|x|> [INST] </s>",
)
_VOCABULARY_STEP = 7  # every seventh token is in a probe
_TOKENS_IN_PROBE = 64


def encode_text(backend: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the ids by `tokenizers`.

    Raises:
        InvalidRequestError: A word has no token, or the package fails, which is no `Exception`.
    """
    try:
        # A batch of one text, because `tokenizers` releases the GIL only for batches.
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidRequestError(f"the model's tokenizer cannot read the text: {error}") from error
    ids: list[int] = encoding.ids
    return ids


def encode_flat(fast: fastokens.Tokenizer, texts: Sequence[str]) -> "list[array[int]]":
    """Return the packed ids of each text by `fastokens`; raise one of ``REFUSALS`` for all."""
    flat, bounds = fast.encode_batch_flat(list(texts))
    ids = array("I")
    ids.frombytes(flat)
    ends = array("Q")
    ends.frombytes(bounds)
    return [ids[begin:end] for begin, end in pairwise(ends)]


def open_fast_encoder(backend: Tokenizer) -> fastokens.Tokenizer | None:
    """Return the tokenizer in `fastokens`; None if it is unsupported or gives other ids."""
    try:
        fast = fastokens.Tokenizer.from_json_str(backend.to_str())
    except REFUSALS:
        return None
    same = all(
        _agree(fast, backend, text, special)
        for text in _probes(backend)
        for special in (False, True)
    )
    return fast if same else None


def _agree(fast: fastokens.Tokenizer, backend: Tokenizer, text: str, special: bool) -> bool:
    try:
        ids: list[int] = fast.encode(text, add_special_tokens=special).ids
        [packed] = encode_flat(fast, [text])
    except REFUSALS:
        return True
    return ids == encode_text(backend, text, add_special_tokens=special) and (
        special or packed.tolist() == ids
    )


def _probes(backend: Tokenizer) -> Iterator[str]:
    """Yield texts that are hard to split, and much of the vocabulary in both orders."""
    yield from _HARD
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    yield "x".join(added[:_TOKENS_IN_PROBE])
    yield " ".join(added[:_TOKENS_IN_PROBE])
    size = backend.get_vocab_size(with_added_tokens=False)
    ids = list(range(0, size, _VOCABULARY_STEP))
    for first in range(0, len(ids), _TOKENS_IN_PROBE):
        some = ids[first : first + _TOKENS_IN_PROBE]
        yield backend.decode(some, skip_special_tokens=False)
        yield backend.decode(some[::-1], skip_special_tokens=False)
