"""Tokenizer from a `tokenizer.json` or from a GGUF file's metadata.

The `tokenizers` package is the reference, `fastokens` a faster equivalent. Ids are decoded to
*bytes*, not text: a token may contain part of a character, so callers decode the joined bytes
(``baton/text/detokenizer.py``).
"""

import contextlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import fastokens
from tokenizers import Tokenizer

from baton.text.fast_encoder import REFUSALS, encode_flat, encode_text, open_fast_encoder
from baton.text.gguf_tokenizer import build_from_gguf
from baton.text.segments import (
    LONG_CHARACTERS,
    SegmentEncoder,
    splits_at_special_tokens,
    splits_between_words,
)
from baton.types.errors import InvalidRequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # a space in SentencePiece


@cache
def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table of the printable character for each byte.

    Printable bytes stand for themselves; the others are shifted to U+0100 and up.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    shifted = (byte for byte in range(256) if byte not in plain)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(shifted)})
    return table


class _ShownTexts(dict[int, str | None]):
    """Visible text of each token; None if its bytes are not UTF-8 by themselves."""

    def __init__(self, shown_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._shown_bytes = shown_bytes

    def __missing__(self, token_id: int) -> str | None:
        shown = self._shown_bytes(token_id)
        self[token_id] = text = shown.decode() if _is_text(shown) else None
        return text


class TextTokenizer:
    """Tokenizer of one of the two families that language models use.

    ``byte-level`` (GPT-2, Llama 3, Qwen, SmolLM …) writes every byte as one printable character;
    ``sentencepiece`` (Llama 2, Gemma …) writes spaces as ``▁`` and unknown bytes as ``<0x..>``.

    Attributes:
        strip_first_space: Whether decoding removes the space that encoding puts before the text.

    Raises:
        ValueError: The decoder is of neither family.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self._fast: fastokens.Tokenizer | None = None
        self._segments: SegmentEncoder | None = None
        self._frame: tuple[Sequence[int], Sequence[int]] | None = None
        self._added = backend.get_added_tokens_decoder()
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        steps = _decoder_steps(backend)
        self.byte_level = "ByteLevel" in steps
        self._by_metaspace = "Metaspace" in steps  # which strips all spaces of a first token
        scheme = steps.get("Metaspace", {}).get("prepend_scheme", "never")
        self.strip_first_space = "Strip" in steps or scheme != "never"
        self._has_byte_tokens = "ByteFallback" in steps
        self._space = _SPACE if steps.keys() & {"Replace", "Metaspace"} else " "
        self._bytes: dict[int, bytes] = {}
        self.shown_texts: Mapping[int, str | None] = _ShownTexts(self.shown_bytes)
        """Visible text by token id; None if the bytes are not UTF-8 without other tokens."""

    def speed_up(self, template: str = "") -> bool:
        """Encode with `fastokens` from now on if it gives the same ids; return whether it does.

        It takes half a second (four for vocabularies of 262,144 tokens) and about 55 MB or more.
        Thread-safe.

        Args:
            template: Chat template. Its special tokens separate cached segments of conversations.
        """
        if any(token.lstrip or token.rstrip or token.single_word for token in self._added.values()):
            return False  # `fastokens` reads such tokens otherwise, and so would segments be
        try:
            self._fast = open_fast_encoder(self.backend)
            self._segments = self._segment_encoder(template)
            self._frame = _frame_of(self)
        except InvalidRequestError:  # a probe has words without tokens
            self._fast = self._segments = None
        return self._fast is not None

    def _segment_encoder(self, template: str) -> SegmentEncoder | None:
        special = {self._added[i].content: i for i in self.special_ids}
        used = {text: token_id for text, token_id in special.items() if text in template}
        if not splits_at_special_tokens(self.encode, used):
            used = {}
        words = splits_between_words(self.encode, self.backend.get_vocab(with_added_tokens=True))
        cut = used or words
        return SegmentEncoder(self.encode_all, used, between_words=words) if cut else None

    def encode_again(
        self, text: str, scope: str = "", *, add_special_tokens: bool = False
    ) -> Sequence[int]:
        """Return the token ids of a text that may begin as an earlier one, as `encode` does.

        Those of a long text are packed.

        Args:
            text: Any text, as for `encode`.
            scope: Only texts of the same scope share cached segments.
            add_special_tokens: As for `encode`.
        """
        frame = self._frame if add_special_tokens else ((), ())
        if self._segments is None or frame is None or len(text) < LONG_CHARACTERS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return array("I", frame[0]) + self._segments.encode(text, scope) + array("I", frame[1])

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of ``text``.

        Args:
            text: Any text; special tokens in it are recognised.
            add_special_tokens: Whether to add the model's special tokens, such as BOS. Chat
                templates contain them already.

        Raises:
            InvalidRequestError: The vocabulary lacks a word, and has no token for unknown words.
        """
        if (fast := self._fast) is not None:
            with contextlib.suppress(*REFUSALS):  # `tokenizers` may accept the text
                ids: list[int] = fast.encode(text, add_special_tokens=add_special_tokens).ids
                return ids
        return encode_text(self.backend, text, add_special_tokens=add_special_tokens)

    def encode_all(self, texts: Sequence[str]) -> "list[array[int]]":
        """Return the packed token ids of each text, as `encode` does, but in one call.

        Other threads run meanwhile: no object is made for an id.
        """
        if (fast := self._fast) is not None:
            with contextlib.suppress(*REFUSALS):
                return encode_flat(fast, texts)
        return [array("I", self.encode(text)) for text in texts]

    def texts_from(self, first_id: int) -> list[tuple[int, str]]:
        """Return the tokens with ids of at least ``first_id``, as ids and texts."""
        end = max(self.vocab_size, *(i + 1 for i in self._added), 0)
        named = ((i, self.backend.id_to_token(i)) for i in range(first_id, end))
        return [(i, text) for i, text in named if text is not None]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, special ones included; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self.spell(token_id)
        return known

    def spell(self, token_id: int) -> bytes:
        """Return the bytes of a token without caching them."""
        added = self._added.get(token_id)
        piece: str | None = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if added is not None and added.special:
            return str(added.content).encode()
        if not self.byte_level:
            raw = _BYTE_TOKEN.fullmatch(piece) if self._has_byte_tokens else None
            return bytes([int(raw[1], 16)]) if raw else piece.replace(self._space, " ").encode()
        alphabet = byte_alphabet()
        if all(character in alphabet for character in piece):
            spelled = bytes(alphabet[character] for character in piece)
            if added is None or _is_text(spelled):
                return spelled
        return piece.encode()

    def shown_bytes(self, token_id: int) -> bytes:
        """Return the visible bytes of a token; empty for a special one."""
        return b"" if token_id in self.special_ids else self.token_bytes(token_id)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        spell = self.shown_bytes if skip_special_tokens else self.token_bytes
        pieces = [piece for piece in map(spell, ids) if piece]
        if self.strip_first_space and pieces:
            bare = pieces[0].lstrip(b" ") if self._by_metaspace else pieces[0].removeprefix(b" ")
            pieces[0] = bare
        return b"".join(pieces).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, as in the ``token`` field of logprobs."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _frame_of(tokenizer: TextTokenizer) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return the special tokens before and behind a text; None if they depend on it."""
    plain, framed = (tokenizer.encode(" x", add_special_tokens=add) for add in (False, True))
    for begin in range(len(framed) - len(plain) + 1):
        frame = framed[:begin], framed[begin + len(plain) :]
        first = "".join(map(tokenizer.token_text, framed[:1]))
        texts = ("x", " a b", "\n", f"{first} x")
        if all(
            tokenizer.encode(text, add_special_tokens=True)
            == [*frame[0], *tokenizer.encode(text), *frame[1]]
            for text in texts
        ):
            return frame
    return None


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


_STEPS: dict[str, dict[str, Any]] = {
    "Replace": {"pattern": {"String": _SPACE}, "content": " "},
    "Metaspace": {"replacement": _SPACE},
    "Strip": {"content": " ", "start": 1, "stop": 0},
    "ByteFallback": {},
    "Fuse": {},
    "ByteLevel": {},
}
"""Steps of decoders, with the settings that `TextTokenizer.spell` has."""
_ORDER = re.compile(
    "ByteLevel( Fuse)?|Metaspace( ByteFallback( Fuse)?)?|ByteFallback Metaspace"
    "|(Replace )?ByteFallback( Fuse( Strip)?)?"
)
"""Orders of steps that work token by token; others change the text of whole answers."""


def _decoder_steps(backend: Tokenizer) -> dict[str, dict[str, Any]]:
    """Return the steps of the decoder by type; raise ``ValueError`` for unsupported ones."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    steps = decoder.get("decoders", [decoder])
    by_type = {step["type"]: step for step in steps}
    if wrong := [s for s in steps if not s.items() >= _STEPS.get(s["type"], {"": 0}).items()]:
        raise ValueError(f"step {str(wrong[0])[:80]} of the decoder is not supported")
    if not _ORDER.fullmatch(order := " ".join(step["type"] for step in steps)):
        raise ValueError(f"decoder {order[:80]} is neither byte-level nor SentencePiece")
    return by_type


def load_tokenizer(source: str | Mapping[str, Any], *, encodes: bool = True) -> TextTokenizer:
    """Build a tokenizer from the text of a `tokenizer.json`, or from a GGUF file's metadata.

    Without ``encodes`` it is ready sooner, for checks and for the texts of tokens.

    Raises ``ValueError`` if the kind of tokenizer is not supported.
    """
    if isinstance(source, str):
        try:
            backend = Tokenizer.from_str(source)
        except Exception as error:  # `tokenizers` raises no more specific type
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        # Settings of training, which would cut, lengthen or vary prompts.
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None):
            backend.model.dropout = None
        return TextTokenizer(backend)
    try:
        return TextTokenizer(build_from_gguf(source, encodes=encodes))
    except (AttributeError, LookupError, OverflowError, TypeError) as error:
        raise ValueError(f"invalid value of tokenizer.ggml ({error})") from error
