"""Images of a chat: read from the body, checked, and placed in its prompt.

body ──▶ `read_images` ──▶ files and their forms, by URL ──▶ `place_images` ──▶ prompt
         (waits)                                             (in a thread)
"""

import binascii
import re
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b

from baton.types.errors import InvalidRequestError
from baton.types.images import DIGEST_BYTES, PromptImage
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.messages import images_of
from router.frontend.off_loop import off_loop
from router.lane import Lane
from router.routing.checks.images import ImageForm

_DATA_URL = re.compile(r"data:[\w/+.-]{0,64}(;[\w=.-]{1,64}){0,4};base64,", re.IGNORECASE)


Images = Mapping[str, tuple[bytes, ImageForm]]
"""Files of a body's images and their forms, by URL."""


async def read_images(body: ChatBody, lane: Lane, tenant: str) -> Images:
    """Return the images of a chat, each checked; raise BatonError if one cannot be used."""
    listed = list(images_of(body.messages))
    if not listed or not lane.model.takes_images:
        return {}
    limits = lane.core.settings.clients.images
    if len(listed) > limits.most:
        raise InvalidRequestError.at(listed[limits.most][1], f"over {limits.most} images")
    pixels = 0
    ready: dict[str, tuple[bytes, ImageForm]] = {}
    for _, where, url in listed:
        if url not in ready:
            if head := _DATA_URL.match(url):
                data = await off_loop(len(url), partial(_file_in, url[head.end() :], where))
            else:
                data = await lane.images.remote.file(url, where, tenant)
            ready[url] = data, await lane.images.form(data, where, tenant)
        pixels += ready[url][1][2]
        if pixels > limits.most_pixels:
            raise InvalidRequestError.at(where, f"over {limits.most_pixels} pixels of all images")
    return ready


def _file_in(text: str, where: str) -> bytes:
    """Return the file that the URL of an image contains."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise InvalidRequestError.at(where, "the image is no valid base64") from None


def place_images(
    prompt: Sequence[int], body: ChatBody, images: Images, scope: str
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return a prompt with its images, whose digests differ between cache scopes."""
    key = blake2b(scope.encode(), digest_size=DIGEST_BYTES).digest()
    tokens: list[int] = []
    placed: list[PromptImage] = []
    end = 0
    for _, where, url in images_of(body.messages):
        data, (own_tokens, placeholder, _) = images[url]
        begin = _next(prompt, placeholder, end)
        if begin is None:
            raise InvalidRequestError.at(
                where, "the model's chat template has no place for an image in this message"
            )
        tokens += prompt[end:begin]
        digest = blake2b(data, key=key, digest_size=DIGEST_BYTES).digest()
        placed.append(PromptImage(data, digest, len(tokens), len(own_tokens), placeholder))
        tokens += own_tokens
        end = begin + len(placeholder)
    if placed and _next(prompt, placed[-1].placeholder, end) is not None:
        raise InvalidRequestError.at(
            "messages", "a text contains the model's placeholder of an image: leave it out"
        )
    return [*tokens, *prompt[end:]], tuple(placed)


def _next(prompt: Sequence[int], placeholder: Sequence[int], begin: int) -> int | None:
    """Return the first place of a placeholder at or behind ``begin``."""
    length = len(placeholder)
    places = (at for at in range(begin, len(prompt)) if prompt[at] == placeholder[0])
    return next((at for at in places if tuple(prompt[at : at + length]) == placeholder), None)
