"""Responses of ``POST /v1/embeddings``, made of pooled hidden states."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.types.errors import QueueFullError
from router.frontend.api.bodies.embedding import EmbeddingBody
from router.frontend.api.call_response import AnswerContext, CallResponse
from router.frontend.api.formats.answer_format import usage
from router.request import GenerationRequest
from router.routing.requests.gateway import Gateway


class EmbeddingAnswer(CallResponse):
    """Response to one embeddings call.

    To leave space in the queue, only as many inputs run or wait as one worker runs at once.
    """

    def __init__(
        self, context: AnswerContext, requests: Sequence[GenerationRequest], body: EmbeddingBody
    ) -> None:
        super().__init__(context, requests)
        self._body = body
        self._at_once = context.lane.settings.window_requests

    async def _submit_all(self, gateway: Gateway) -> bool:
        """Submit the next input whenever one has ended."""
        for request in self.call.requests:
            if not await self._wait(lambda: self._failed or self._open < self._at_once):
                return False
            if self._failed:
                return True
            try:
                self.call.active.append(gateway.submit(request, self._wakeup))
            except QueueFullError:
                if not self._open:
                    raise
                # The queue is full of other calls: retry when all inputs of this call have ended.
                if not await self._wait(lambda: not self._open):
                    return False
                self.call.active.append(gateway.submit(request, self._wakeup))
        return await self._wait(self._may_start)

    @property
    def _failed(self) -> bool:
        return any(active.record.error is not None for active in self.call.active)

    @property
    def _open(self) -> int:
        return sum(not active.record.ended for active in self.call.active)

    def _whole(self) -> dict[str, Any]:
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": written(active.record.embedding, self._body),
            }
            for index, active in enumerate(self.call.active)
        ]
        return {
            "object": "list",
            "data": data,
            "model": self._body.model,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        tokens = usage(self.call.active)["prompt_tokens"]
        return {"prompt_tokens": tokens, "total_tokens": tokens}


def written(embedding: bytes, body: EmbeddingBody) -> list[float] | str:
    """Cut, scale and encode a pooled vector (float32, little-endian) according to ``body``."""
    vector = np.frombuffer(embedding, "<f4")[: body.dimensions].astype(np.float64)
    if body.normalize:
        vector /= max(np.linalg.norm(vector), np.finfo(np.float32).tiny)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.astype(np.float32).tolist()
    return numbers
