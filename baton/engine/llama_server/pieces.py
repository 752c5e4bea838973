"""Tokens of a vocabulary by their bytes."""

from baton.text.tokenizer import TextTokenizer

_LONGEST_BYTES = 8  # tokens that end within a character have few bytes


class TokenPieces:
    """Bytes of tokens, and tokens by their bytes. The first search reads the whole vocabulary."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_bytes: dict[bytes, int] = {}

    def spell(self, token: int) -> bytes:
        """Return the bytes of a token; empty for special ones, which have no text."""
        if token in self._tokenizer.special_ids:
            return b""
        return self._tokenizer.token_bytes(token)

    def split(self, text: bytes, count: int) -> tuple[int, ...]:
        """Return ``count`` tokens with the bytes of ``text``, the first as long as possible.

        Empty if there are none. Of two tokens with equal bytes the first one is taken.
        """
        if not self._by_bytes:
            for token in range(self._tokenizer.vocab_size):
                piece = self.spell(token)
                if piece and len(piece) <= _LONGEST_BYTES:
                    self._by_bytes.setdefault(piece, token)
        return self._find(text, count, set())

    def _find(self, text: bytes, count: int, failed: set[tuple[int, int]]) -> tuple[int, ...]:
        """Return the tokens; ``failed`` are lengths of the text's ends, and counts, without any."""
        key = len(text), count
        if key in failed or len(text) > count * _LONGEST_BYTES:
            return ()
        if count == 1:
            only = self._by_bytes.get(text)
            return () if only is None else (only,)
        for size in range(min(len(text) - count + 1, _LONGEST_BYTES), 0, -1):
            first = self._by_bytes.get(text[:size])
            if first is not None and (rest := self._find(text[size:], count - 1, failed)):
                return (first, *rest)
        failed.add(key)
        return ()
