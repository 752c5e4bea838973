"""Images of a prompt, and the tokens by which blocks with images are named.

    prompt   [ text | token of an image, repeated | text ]
    hashed   [ text | words of the image's digest | text ]

So the same image is the same prefix, and other images of the same size are not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import shake_128

import numpy as np

DIGEST_BYTES = 16
_BEYOND_VOCABULARIES = np.uint32(1 << 31)
_NAME = re.compile(rf"(?:^|:)([0-9a-f]{{{2 * DIGEST_BYTES}}})-([0-9]{{1,6}})$")


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt, whose tokens are [begin, begin + count).

    Attributes:
        data: The file.
        digest: Digest of the file and the cache scope.
        placeholder: Tokens that the engine replaces with those of the image.
    """

    data: bytes = field(repr=False)
    digest: bytes
    begin: int
    count: int
    placeholder: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name for an engine that reports which images its blocks contain."""
        return f"{self.digest.hex()}-{self.count}"


@lru_cache(maxsize=64)
def words_of(digest: bytes, count: int) -> tuple[int, ...]:
    """Return the words that stand in for the ``count`` tokens of an image."""
    words = np.frombuffer(shake_128(digest).digest(4 * count), dtype="<u4")
    return tuple((words | _BEYOND_VOCABULARIES).tolist())


def words_named(name: str) -> tuple[int, ...] | None:
    """Return the words of the image with this `PromptImage.name`; None for other names."""
    match = _NAME.search(name)
    return words_of(bytes.fromhex(match[1]), int(match[2])) if match is not None else None


def hashed_tokens(prompt: Sequence[int], images: Sequence[PromptImage]) -> Sequence[int]:
    """Return the tokens by which the blocks of a prompt are named."""
    if not images:
        return prompt
    tokens = list(prompt)
    for image in images:
        tokens[image.begin : image.begin + image.count] = words_of(image.digest, image.count)
    return tokens


def with_placeholders(prompt: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
    """Return a prompt with the placeholder of each image in place of its tokens."""
    tokens = list(prompt)
    for image in reversed(images):
        tokens[image.begin : image.begin + image.count] = image.placeholder
    return tokens
