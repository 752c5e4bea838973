"""Bodies that are packed with gzip, and bodies that are not UTF-8.

A body is unfolded piece by piece and no further than the limit, so that a small body that unfolds
to a large one costs no more than a large one would have: it is refused at the limit.
"""

import zlib

from baton.types.errors import InvalidRequestError, UnsupportedMediaError

_BOM = b"\xef\xbb\xbf"
_MAX_PARTS = 1000  # members of one body: each costs something, however little is in it
_OTHERS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


class BodyTooLargeError(Exception):
    """More bytes than allowed; the caller knows the limit."""


class Gunzip:
    """A gzip body, of several members too, that is unfolded as it comes."""

    def __init__(self) -> None:
        self._begun = False
        self._parts = 0
        self._inflate = self._new()

    @classmethod
    def of(cls, content_encoding: str) -> "Gunzip | None":
        """Return what unfolds a body with this header; None for one that stands as it is.

        Raises:
            UnsupportedMediaError: The encoding is not gzip.
        """
        name = content_encoding.strip().lower()
        if name in ("", "identity"):
            return None
        if name in ("gzip", "x-gzip"):
            return cls()
        raise UnsupportedMediaError(
            f"content-encoding: {content_encoding[:40]!r} is not supported; send gzip, or the body "
            "as it is",
            param="content-encoding",
        )

    def _new(self) -> "zlib._Decompress":
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise _damaged(f"it has more than {_MAX_PARTS} members")
        return zlib.decompressobj(16 + zlib.MAX_WBITS)

    def feed(self, data: bytes, room: int) -> bytes:
        """Return what ``data`` unfolds to.

        Raises:
            BodyTooLargeError: That is more than ``room`` bytes.
            InvalidRequestError: It is not gzip.
        """
        self._begun = self._begun or bool(data)
        found = bytearray()
        try:
            while data:
                if self._inflate.eof:
                    self._inflate = self._new()
                found += self._inflate.decompress(data, room - len(found) + 1)
                if len(found) > room:
                    raise BodyTooLargeError
                data = self._inflate.unused_data if self._inflate.eof else b""
        except zlib.error as error:
            raise _damaged(str(error)) from error
        return bytes(found)

    def end(self) -> None:
        """Check that the body is complete.

        Raises:
            InvalidRequestError: It ends in the middle of a member.
        """
        if self._begun and not self._inflate.eof:
            raise _damaged("it ends in the middle")


def _damaged(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is not valid gzip: {why}", param="content-encoding")


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
