"""From pooled vectors to the bodies of ``/score``, ``/rerank`` and ``/pooling``.

A score is the cosine of two vectors, as vLLM scores with embedding models: no cross-encoder runs.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from router.frontend.api.answer import AnswerContext
from router.frontend.api.bodies.embedding import EmbeddingBody
from router.frontend.api.embeddings import EmbeddingAnswer, written
from router.frontend.api.pooling.bodies import RerankBody
from router.request import GenerationRequest

Write = Callable[[Sequence[bytes]], dict[str, Any]]
"""From the embeddings (float32, little-endian) to what the answer holds besides id and usage."""


class PooledAnswer(EmbeddingAnswer):
    """The answer to one call, made of the vectors of all its texts.

    Args:
        context: Shared parts.
        requests: One for each text.
        body: How the vectors are pooled.
        write: Makes the answer of them.
        at_once: Texts that wait or run together.
    """

    def __init__(
        self,
        context: AnswerContext,
        requests: Sequence[GenerationRequest],
        body: EmbeddingBody,
        write: Write,
        *,
        at_once: int,
    ) -> None:
        super().__init__(context, requests, body, at_once=at_once)
        self._write_vectors = write

    def _whole(self) -> dict[str, Any]:
        tokens = sum(active.record.prompt_tokens for active in self._active)
        return {
            "id": self._context.request_id,
            "model": self._body.model,
            **self._write_vectors([active.record.embedding for active in self._active]),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def scored(pairs: Sequence[tuple[int, int]]) -> Write:
    """The answer in vLLM's shape: a score for each pair of places in the list of vectors."""

    def write(embeddings: Sequence[bytes]) -> dict[str, Any]:
        vectors = _unit(embeddings)
        data = [
            {"index": index, "object": "score", "score": float(vectors[left] @ vectors[right])}
            for index, (left, right) in enumerate(pairs)
        ]
        return {"object": "list", "created": int(time.time()), "data": data}

    return write


def ranked(body: RerankBody) -> Write:
    """As Jina and Cohere write it: the best documents first. The first vector is the query's."""

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
    """The answer in vLLM's shape: the vectors, under names of their own."""

    def write(embeddings: Sequence[bytes]) -> dict[str, Any]:
        data = [
            {"index": index, "object": "pooling", "data": written(embedding, how)}
            for index, embedding in enumerate(embeddings)
        ]
        return {"object": "list", "created": int(time.time()), "data": data}

    return write


def _unit(embeddings: Sequence[bytes]) -> NDArray[np.float64]:
    """The vectors as rows, [count, hidden size], each of length 1 (or 0)."""
    rows = np.stack([np.frombuffer(one, "<f4") for one in embeddings]).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: NDArray[np.float64] = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit
