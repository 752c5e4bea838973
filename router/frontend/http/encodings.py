"""Bodies that come packed: gzip, deflate, zstd; and what is not UTF-8.

A body is unfolded piece by piece and no further than the limit, so that a small body that unfolds
to a large one costs no more than a large one would have: it is refused at the limit.
"""

import zlib
from typing import Protocol

import zstandard

from baton.types.errors import InvalidRequestError, UnsupportedMediaError

ENCODINGS = ("gzip", "deflate", "zstd")

_BOM = b"\xef\xbb\xbf"
_MAX_PARTS = 1000  # members or frames of one body: each costs something, however little is in it
_PIECE_BYTES = 64
_MAX_WINDOW_BYTES = 8 * 1024 * 1024  # what RFC 9659 lets zstd ask of a receiver
_OTHERS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


class BodyTooLargeError(Exception):
    """More bytes than allowed; the caller knows the limit."""


class Unfolder(Protocol):
    """Takes a body's bytes as they come."""

    def feed(self, data: bytes, room: int) -> bytes:
        """What ``data`` unfolds to.

        Raises:
            BodyTooLargeError: That is more than ``room`` bytes.
            InvalidRequestError: It is not what the header says.
        """

    def end(self) -> None:
        """The body is over.

        Raises:
            InvalidRequestError: In the middle of something.
        """


def unfolder_of(content_encoding: str) -> Unfolder | None:
    """What unfolds a body with this header; None for one that stands as it is.

    Raises:
        UnsupportedMediaError: Nothing here does.
    """
    name = content_encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name in ("gzip", "x-gzip", "deflate"):
        return _Zlib(name.removeprefix("x-"))
    if name == "zstd":
        return _Zstd()
    raise UnsupportedMediaError(
        f"content-encoding: {content_encoding[:40]!r} is not supported; send one of "
        f"{', '.join(ENCODINGS)}, or the body as it is",
        param="content-encoding",
    )


class _Zlib:
    """gzip (of several members too) and deflate, with zlib's head or bare."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False
        self._parts = 0
        self._inflate = self._new()

    def _new(self, *, bare: bool = False) -> "zlib._Decompress":
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _damaged(self._name, f"it has more than {_MAX_PARTS} members")
        if self._name == "gzip":
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        return zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS)

    def feed(self, data: bytes, room: int) -> bytes:
        """See `Unfolder`."""
        if data and not self._begun:
            self._begun = True
            if self._name == "deflate" and data[0] & 0x0F != 8:  # some senders leave the head out
                self._inflate = self._new(bare=True)
        found = bytearray()
        try:
            while data:
                if self._inflate.eof:
                    self._inflate = self._new()
                found += self._inflate.decompress(data, room - len(found) + 1)
                if len(found) > room:
                    raise BodyTooLargeError
                data = self._inflate.unused_data if self._inflate.eof else b""
                if data and self._name != "gzip":
                    raise _damaged(self._name, "bytes follow its end")
        except zlib.error as error:
            raise _damaged(self._name, str(error)) from error
        return bytes(found)

    def end(self) -> None:
        """See `Unfolder`."""
        if self._begun and not self._inflate.eof:
            raise _damaged(self._name, "it ends in the middle")


class _Zstd:
    """One frame, or several."""

    def __init__(self) -> None:
        self._context = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._frame = self._context.decompressobj()
        self._frames = 1
        self._open = False

    def feed(self, data: bytes, room: int) -> bytes:
        """See `Unfolder`."""
        found, view, at = bytearray(), memoryview(data), 0
        try:
            while at < len(view):
                if self._frame.eof:
                    self._frame = self._context.decompressobj()
                    self._frames += 1
                    if self._frames > _MAX_PARTS:
                        raise _damaged("zstd", f"it has more than {_MAX_PARTS} frames")
                # A block unfolds to 128 KiB at most, and none is smaller than four bytes: so that
                # little is unfolded at a time, little is given.
                piece = view[at : at + _PIECE_BYTES]
                at += len(piece)
                found += self._frame.decompress(piece)
                if len(found) > room:
                    raise BodyTooLargeError
                if self._frame.eof:
                    at -= len(self._frame.unused_data)
                self._open = not self._frame.eof
        except zstandard.ZstdError as error:
            raise _damaged("zstd", str(error)) from error
        return bytes(found)

    def end(self) -> None:
        """See `Unfolder`."""
        if self._open:
            raise _damaged("zstd", "it ends in the middle")


def _damaged(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is not valid {name}: {why}", param="content-encoding")


def utf8_of(body: bytes) -> bytes:
    """A text body without its byte order mark.

    Raises:
        InvalidRequestError: The text is of another encoding than UTF-8.
    """
    if body.startswith(_BOM):
        return body[len(_BOM) :]
    for mark, name in _OTHERS:
        if body.startswith(mark):
            raise _not_utf8(name)
    # JSON begins with an ASCII character, so a NUL beside it means two bytes a character.
    if 0 in body[:2]:
        raise _not_utf8("UTF-16")
    return body


def _not_utf8(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is {name}; send it as UTF-8")
