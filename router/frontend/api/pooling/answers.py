"""Responses of ``/score``, ``/rerank`` and ``/pooling``, made of pooled vectors.

A score is the cosine of two vectors, which is vLLM's score of embedding models.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.frontend.api.bodies.embedding import EmbeddingBody
from router.frontend.api.call_response import AnswerContext
from router.frontend.api.embeddings import EmbeddingAnswer, written
from router.frontend.api.pooling.bodies import RerankBody
from router.request import GenerationRequest

Write = Callable[[Sequence[bytes]], dict[str, Any]]
"""Converts embeddings (float32, little-endian) to the response's fields besides id and usage."""


class PooledAnswer(EmbeddingAnswer):
    """Response that ``write`` computes from the vectors of all texts. See `EmbeddingAnswer`."""

    def __init__(
        self,
        context: AnswerContext,
        requests: Sequence[GenerationRequest],
        body: EmbeddingBody,
        write: Write,
    ) -> None:
        super().__init__(context, requests, body)
        self._write_vectors = write

    def _whole(self) -> dict[str, Any]:
        return {
            "id": self.call.id,
            "model": self._body.model,
            **self._write_vectors([active.record.embedding for active in self.call.active]),
            "usage": self._usage(),
        }


def scored(pairs: Sequence[tuple[int, int]]) -> Write:
    """Return a writer of vLLM's scores, one for each pair of indexes of vectors."""

    def write(embeddings: Sequence[bytes]) -> dict[str, Any]:
        vectors = _unit(embeddings)
        data = [
            {"index": index, "object": "score", "score": float(vectors[left] @ vectors[right])}
            for index, (left, right) in enumerate(pairs)
        ]
        return {"object": "list", "created": int(time.time()), "data": data}

    return write


def ranked(body: RerankBody) -> Write:
    """Return a writer of Jina's and Cohere's rankings. The first vector is the query's."""

    def write(embeddings: Sequence[bytes]) -> dict[str, Any]:
        vectors = _unit(embeddings)
        texts = body.texts()
        scores = vectors[1:] @ vectors[0]
        best = np.argsort(-scores, kind="stable")[: body.top_n or len(texts)]
        results = []
        for index in best.tolist():
            result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
            if body.return_documents:
                result["document"] = {"text": texts[index]}
            results.append(result)
        return {"results": results}

    return write


def pooled(how: EmbeddingBody) -> Write:
    """Return a writer of the vectors in vLLM's format."""

    def write(embeddings: Sequence[bytes]) -> dict[str, Any]:
        data = [
            {"index": index, "object": "pooling", "data": written(embedding, how)}
            for index, embedding in enumerate(embeddings)
        ]
        return {"object": "list", "created": int(time.time()), "data": data}

    return write


def _unit(embeddings: Sequence[bytes]) -> NDArray[np.float64]:
    """Return the vectors scaled to length 1 (or 0), shape [count, hidden size]."""
    rows = np.stack([np.frombuffer(raw, "<f4") for raw in embeddings]).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float64] = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit
