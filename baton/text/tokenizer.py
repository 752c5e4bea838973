"""Text to token ids and back, from a `tokenizer.json` or from a GGUF file's own metadata.

The `tokenizers` wheel says what is right, and `fastokens` says the same sooner. Ids turn back into
*bytes*, not text: a token may hold half a character, so whoever shows text decodes the joined bytes
(``baton/text/detokenizer.py``).
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import fastokens
from tokenizers import Tokenizer, decoders

from baton.text.fast_encoder import REFUSALS, open_fast_encoder
from baton.text.gguf_tokenizer import build_from_gguf

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # how SentencePiece writes a space


def byte_alphabet() -> dict[str, int]:
    """GPT-2's table: the printable character that stands for each byte.

    Bytes that print well stand for themselves; the others are shifted to U+0100 and up.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    shifted = (byte for byte in range(256) if byte not in plain)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(shifted)})
    return table


class _ShownTexts(dict[int, str | None]):
    """What a user sees of a token; None of one whose bytes are no text by themselves."""

    def __init__(self, shown_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._shown_bytes = shown_bytes

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._shown_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class TextTokenizer:
    """A tokenizer of one of the two families that language models use.

    ``byte-level`` (GPT-2, Llama 3, Qwen, SmolLM …) writes every byte as one printable character;
    ``sentencepiece`` (Llama 2, Gemma …) writes spaces as ``▁`` and unknown bytes as ``<0x..>``.

    Args:
        backend: The `tokenizers` object that encodes.
        strip_first_space: The encoder put a space before the text, which decoding takes away.

    Raises:
        ValueError: The decoder is of neither family.
    """

    def __init__(self, backend: Tokenizer, *, strip_first_space: bool = False) -> None:
        self._backend = backend
        self._fast: fastokens.Tokenizer | None = None
        self._added = backend.get_added_tokens_decoder()
        self.strip_first_space = strip_first_space
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.byte_level = _is_byte_level(backend)
        self._bytes: dict[int, bytes] = {}
        self.shown_texts: Mapping[int, str | None] = _ShownTexts(self.shown_bytes)
        """By id what a user sees of a token; None: its bytes are no text without others."""

    @property
    def backend(self) -> Tokenizer:
        """The `tokenizers` object that encodes."""
        return self._backend

    def speed_up(self) -> bool:
        """Encode by `fastokens` from now on, if it gives the same ids; says whether it does.

        It takes half a second (vocabularies of 262,144 tokens: four) and some 55 MB (more for
        those). Any thread may call it while others encode.
        """
        self._fast = open_fast_encoder(self._backend)
        return self._fast is not None

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        return byte_alphabet()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: Any text; special tokens written in it are recognised.
            add_special_tokens: Whether to put what the model wants in front (such as a BOS token).
                A chat template writes these itself.
        """
        ids: list[int]
        if (fast := self._fast) is not None:
            with contextlib.suppress(*REFUSALS):  # the other may not refuse it
                ids = fast.encode(text, add_special_tokens=add_special_tokens).ids
                return ids
        # A batch, though it is one text: `tokenizers` lets go of the GIL only for batches.
        [found] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = found.ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, special ones included; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self.spell(token_id)
        return known

    def spell(self, token_id: int) -> bytes:
        """As `token_bytes`, and remembers nothing."""
        added = self._added.get(token_id)
        if added is not None:
            return str(added.content).encode()
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if not self.byte_level:
            raw = _BYTE_TOKEN.fullmatch(piece)
            return bytes([int(raw[1], 16)]) if raw else piece.replace(_SPACE, " ").encode()
        alphabet = self._alphabet
        if all(character in alphabet for character in piece):
            return bytes(alphabet[character] for character in piece)
        return piece.encode()

    def shown_bytes(self, token_id: int) -> bytes:
        """The bytes that a user sees of a token: none of a special one."""
        return b"" if token_id in self.special_ids else self.token_bytes(token_id)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        spell = self.shown_bytes if skip_special_tokens else self.token_bytes
        text = b"".join(map(spell, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strip_first_space else text

    def token_text(self, token_id: int) -> str:
        """One token for a human, as the ``token`` field of logprobs shows it."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _is_byte_level(backend: Tokenizer) -> bool:
    decoder = backend.decoder
    if isinstance(decoder, decoders.ByteLevel):
        return True
    described = repr(decoder)
    if "ByteLevel" in described:
        return True
    if "ByteFallback" in described or "Metaspace" in described:
        return False
    raise ValueError(
        f"the tokenizer decodes with {described[:80]}; byte-level and SentencePiece are supported"
    )


def load_tokenizer(source: str | Mapping[str, Any]) -> TextTokenizer:
    """Build a tokenizer.

    Args:
        source: The text of a `tokenizer.json`, or a GGUF file's ``tokenizer.ggml.*`` metadata.

    Raises:
        ValueError: The kind of tokenizer is not supported; the message names it.
    """
    if isinstance(source, str):
        try:
            backend = Tokenizer.from_str(source)
        except Exception as error:  # `tokenizers` raises nothing more special
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        strip = "Strip(" in repr(backend.decoder) or "Metaspace" in repr(backend.decoder)
        return TextTokenizer(backend, strip_first_space=strip and not _is_byte_level(backend))
    backend, strip_first_space = build_from_gguf(source)
    return TextTokenizer(backend, strip_first_space=strip_first_space)
