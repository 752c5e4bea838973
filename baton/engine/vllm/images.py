"""Images in requests to vLLM, without I/O.

vLLM replaces the placeholders of images in a prompt. Its chat renderer returns the tokens
beforehand.
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from baton.engine.process.messages import ImageExpanded
from baton.types.errors import InternalError
from baton.types.images import PromptImage, with_placeholders

RENDER = "/v1/chat/completions/render"

_TYPE = {"type": "image_url"}


def prompt_fields(prompt: Sequence[int], images: Sequence[PromptImage]) -> dict[str, Any]:
    """Return the fields of a request with a prompt."""
    if not images:
        return {"token_ids": prompt}
    return {
        "token_ids": with_placeholders(prompt, images),
        "content_parts": [
            {**_TYPE, "url": _data_url(image.data), "uuid": image.name} for image in images
        ],
        "return_token_ids": True,
    }


def render_body(image: bytes) -> bytes:
    """Return the JSON body that renders a chat of one image, without its tensors."""
    part = {**_TYPE, "image_url": {"url": _data_url(image)}}
    body = {"messages": [{"role": "user", "content": [part]}], "mm_payload": "none"}
    return msgspec.json.encode(body)


def expansion_in(response: bytes, request_id: str) -> ImageExpanded:
    """Return the tokens of the image in a rendered chat."""
    try:
        rendered = msgspec.json.decode(response)
        (place,) = rendered["features"]["mm_placeholders"]["image"]
        prompt = tuple(rendered["token_ids"])
        return ImageExpanded(request_id, prompt, place["offset"], place["length"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise InternalError(f"vLLM rendered no image: {error!r}") from None


def _data_url(image: bytes) -> str:
    return f"data:image/unknown;base64,{b64encode(image).decode()}"
