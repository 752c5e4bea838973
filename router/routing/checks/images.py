"""Images of clients: their check, and the tokens that stand for them in a prompt.

The engine is asked for the tokens, since each model has rules of its own. They depend on the size
of an image, so an answer holds for all images of its size. A worker that finds other tokens in a
prompt ends the request with an error.
"""

import asyncio
import random
from hashlib import blake2b
from typing import Any

import grpc.aio
import msgspec

from baton.config.clients import ImagesConfig
from baton.text.confined import frame
from baton.text.image_check import ImageFile, ImageFinding
from baton.text.template import IMAGE_MARK
from baton.types.errors import InvalidRequestError, UnavailableError
from baton.wire.codecs import error_from_wire
from baton.wire.tokens import unpack_tokens
from router.routing.checks.fair_limit import FairLimit
from router.routing.checks.process import ConfinedProcess, ProcessEndedError
from router.routing.checks.remote_images import RemoteImages
from router.routing.workers.table import WorkerTable
from router.served_model import ServedModel

_KEPT = 4096
_DECODE_S = 5.0
_EXPAND_S = 35.0

ImageForm = tuple[tuple[int, ...], tuple[int, ...], int]
"""Tokens of an image in a prompt, the placeholder that they replace, and its pixels."""


class Images:
    """Checks and forms of the images of one model's clients.

    Attributes:
        remote: Images that requests name by URL.
    """

    def __init__(self, model: ServedModel, workers: WorkerTable, limits: ImagesConfig) -> None:
        self.remote = RemoteImages(limits.hosts)
        self._model = model
        self._workers = workers
        self._most_pixels = limits.most_pixels
        self._process = ConfinedProcess("baton.text.image_check")
        self._limit = FairLimit(1, "images")
        self._asking = FairLimit(4, "images")
        self._findings: dict[bytes, ImageFinding] = {}  # by digest
        self._forms: dict[tuple[int, int], ImageForm] = {}  # by size

    async def close(self) -> None:
        """End the process that decodes images."""
        await self._process.kill()

    async def form(self, data: bytes, where: str, tenant: str) -> ImageForm:
        """Return the form of an image, which stands at ``where`` in a body.

        Raises:
            InvalidRequestError: It is no image that can be used.
            UnavailableError: No worker answers, or too many images of the tenant wait.
        """
        digest = await asyncio.to_thread(lambda: blake2b(data).digest())
        async with self._limit.place(tenant):
            finding = self._findings.get(digest) or await self._examined(data)
            _keep(self._findings, digest, finding)
        if finding.error:
            raise InvalidRequestError.at(where, f"the image {finding.error}")
        size = finding.width, finding.height
        async with self._asking.place(tenant):
            pixels = finding.width * finding.height
            form = self._forms.get(size) or (*await self._ask(data, where), pixels)
            _keep(self._forms, size, form)
        return form

    async def _examined(self, data: bytes) -> ImageFinding:
        if not self._process.is_running:
            await self._process.start()
        try:
            question = frame(ImageFile(data, self._most_pixels))
            body = await self._process.ask(question, _DECODE_S)
        except (TimeoutError, ProcessEndedError) as error:
            if isinstance(error, ProcessEndedError) and error.killed:
                raise UnavailableError("the decoder of images was killed; try again") from error
            return ImageFinding(error="takes too much time or memory to decode")
        return msgspec.msgpack.decode(body, type=ImageFinding)

    async def _ask(self, data: bytes, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return tokens and placeholder of an image by the engine of a worker."""
        links = [s.link for s in self._workers.usable if s.link and s.link.capabilities.images]
        if not links:
            raise UnavailableError("no worker is ready that reads images")
        try:
            answer = await random.choice(links).expand(data, _EXPAND_S)
        except grpc.aio.AioRpcError as failed:
            raise UnavailableError(f"no worker reads images: {failed.details()}") from None
        if answer.HasField("error"):
            error = error_from_wire(answer.error)
            is_of_client = isinstance(error, InvalidRequestError)
            raise InvalidRequestError.at(where, error.message) if is_of_client else error
        rendered = unpack_tokens(answer.prompt_tokens)
        begin = answer.begin
        end = begin + answer.count
        text = self._model.render_chat([{"role": "user", "content": IMAGE_MARK}], images=True)
        own = list(self._model.encode_rendered(text))
        placeholder = own[begin : len(own) - len(rendered) + end]
        if not placeholder or [*rendered[:begin], *placeholder, *rendered[end:]] != own:
            raise UnavailableError(
                "the workers render chats with another template: give them the `chat_template` of "
                "the fleet file with `--chat-template`, or remove it"
            )
        return tuple(rendered[begin:end]), tuple(placeholder)


def _keep(kept: dict[Any, Any], key: object, value: object) -> None:
    if len(kept) >= _KEPT:
        kept.clear()
    kept[key] = value
