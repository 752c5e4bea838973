"""Decompression of gzip bodies, and rejection of bodies that are not UTF-8.

Bodies are decompressed piece by piece up to the limit, so that a small body that expands to a large
one costs no more than a large one.
"""

import zlib

from baton.types.errors import InvalidRequestError, UnsupportedMediaError

_BOM = b"\xef\xbb\xbf"
_MAX_PARTS = 1000  # members of one body; even an empty one costs time
_OTHERS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


class Gunzip:
    """Incremental decoder of gzip bodies with one or more members."""

    def __init__(self) -> None:
        self._begun = False
        self._parts = 0
        self._inflate = self._new()

    @classmethod
    def of(cls, content_encoding: str) -> "Gunzip | None":
        """Return the decoder for this header; None for an uncompressed body."""
        name = content_encoding.strip().lower()
        if name in ("", "identity"):
            return None
        if name in ("gzip", "x-gzip"):
            return cls()
        raise UnsupportedMediaError.at(
            "content-encoding",
            f"{content_encoding[:40]!r} is not supported; send gzip or an uncompressed body",
        )

    def _new(self) -> "zlib._Decompress":
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _corrupt(f"it has more than {_MAX_PARTS} members")
        return zlib.decompressobj(16 + zlib.MAX_WBITS)

    def feed(self, data: bytes, room: int) -> bytes:
        """Decompress ``data``, up to one byte more than ``room``.

        Raises:
            InvalidRequestError: The data is not valid gzip.
        """
        self._begun = self._begun or bool(data)
        output = bytearray()
        try:
            while data and len(output) <= room:
                if self._inflate.eof:
                    self._inflate = self._new()
                output += self._inflate.decompress(data, room - len(output) + 1)
                data = self._inflate.unused_data if self._inflate.eof else b""
        except zlib.error as error:
            raise _corrupt(str(error)) from error
        return bytes(output)

    def end(self) -> None:
        """Check that the body is complete."""
        if self._begun and not self._inflate.eof:
            raise _corrupt("it is incomplete")


def _corrupt(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is not valid gzip: {why}", param="content-encoding")


def utf8_of(body: bytes) -> bytes:
    """Return a body without its byte order mark; reject UTF-16 and UTF-32."""
    if body.startswith(_BOM):
        return body[len(_BOM) :]
    for mark, name in _OTHERS:
        if body.startswith(mark):
            raise _not_utf8(name)
    # JSON begins with an ASCII character, so an adjacent NUL means two bytes per character.
    if 0 in body[:2]:
        raise _not_utf8("UTF-16")
    return body


def _not_utf8(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is {name}; send it as UTF-8")
