"""Endpoints ``/score``, ``/rerank`` and ``/pooling``: each text is an input of an embedding."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from baton.types.errors import InvalidRequestError, PromptTooLongError
from router.frontend.api.bodies.embedding import EmbeddingBody
from router.frontend.api.endpoints import Endpoints
from router.frontend.api.generation import Arrival, Calls
from router.frontend.api.pooling.answers import PooledAnswer, Write, pooled, ranked, scored
from router.frontend.api.pooling.bodies import PooledBody, PoolingBody, RerankBody, ScoreBody
from router.frontend.off_loop import off_loop
from router.process import Process
from router.served_model import ServedModel


def routes(router: Process) -> Endpoints:
    """Return the calls under the paths of vLLM, Jina and Cohere."""
    api = Endpoints()
    calls = _PooledCalls(router)

    @api.post_body("/v1/score", ScoreBody)
    @api.post_body("/score", ScoreBody)
    async def score(request: Request) -> Response:
        """Compute the similarity of texts, which is the cosine of their vectors."""
        return await calls.answer(request, "score", ScoreBody, _PooledCalls.score)

    @api.post_body("/v2/rerank", RerankBody)
    @api.post_body("/v1/rerank", RerankBody)
    @api.post_body("/rerank", RerankBody)
    async def rerank(request: Request) -> Response:
        """Sort documents by their similarity to a query, most similar first."""
        return await calls.answer(request, "rerank", RerankBody, _PooledCalls.rerank)

    @api.post_body("/pooling", PoolingBody)
    async def pooling(request: Request) -> Response:
        """Compute the pooled vector of each input."""
        return await calls.answer(request, "pooling", PoolingBody, _PooledCalls.pooling)

    return api


class _PooledCalls(Calls):
    async def score(self, body: ScoreBody, arrival: Arrival) -> Response:
        left, right = body.sides()
        names = [f"text_1[{i}]" for i in range(len(left))]
        names += [f"text_2[{i}]" for i in range(len(right))]
        pairs = [(index % len(left), len(left) + index) for index in range(len(right))]
        model = arrival.lane.model
        how = await off_loop(arrival.size_bytes, lambda: _how(model, body, [*left, *right], names))
        return await self._pooled("score", how, scored(pairs), arrival)

    async def rerank(self, body: RerankBody, arrival: Arrival) -> Response:
        texts = [body.query, *body.texts()]
        names = ["query", *(f"documents[{i}]" for i in range(len(texts) - 1))]
        model = arrival.lane.model
        how = await off_loop(arrival.size_bytes, lambda: _how(model, body, texts, names))
        return await self._pooled("rerank", how, ranked(body), arrival)

    async def pooling(self, body: PoolingBody, arrival: Arrival) -> Response:
        inputs = body.inputs()
        names = [f"input[{i}]" for i in range(len(inputs))]
        model = arrival.lane.model
        how = await off_loop(arrival.size_bytes, lambda: _how(model, body, inputs, names))
        return await self._pooled("pooling", how, pooled(how), arrival)

    async def _pooled(
        self,
        endpoint: str,
        how: EmbeddingBody,
        write: Write,
        arrival: Arrival,
    ) -> Response:
        context, requests = await self.embedding_requests(endpoint, how, arrival)
        return PooledAnswer(context, requests, how, write)


def _how(
    model: ServedModel,
    body: PooledBody,
    texts: Sequence[str | list[int]],
    names: Sequence[str],
) -> EmbeddingBody:
    """Return the embeddings call for ``texts``, whose fields in errors are ``names``."""
    most = body.most_tokens
    encoded = [_tokens(model, text, name, most) for text, name in zip(texts, names, strict=True)]
    more: dict[str, Any] = {}
    if isinstance(body, PoolingBody):
        more = {
            "encoding_format": body.encoding_format,
            "dimensions": body.dimensions,
            "normalize": body.normalize,
        }
    # The texts are already validated.
    return EmbeddingBody.model_construct(
        model=body.model,
        input=encoded,
        pooling=body.pooling,
        user=body.user,
        priority=body.priority,
        **more,
    )


def _tokens(
    model: ServedModel, text: str | list[int], name: str, most_tokens: int | None
) -> list[int]:
    """Return the token ids of a text, cut to ``most_tokens`` unless it is None."""
    limit = model.max_context_tokens
    if most_tokens is not None:
        most_tokens = limit if most_tokens == -1 else min(most_tokens, limit)
    tokens = list(model.encode_prompt(text, param=name, whole=most_tokens is None)[:most_tokens])
    if not tokens:
        raise InvalidRequestError.at("truncate_prompt_tokens", "must be -1 or at least 1 (got 0)")
    if len(tokens) > limit:
        raise PromptTooLongError.at(
            name,
            f"has {len(tokens)} tokens; {model.context}; cut it with `truncate_prompt_tokens: -1`",
        )
    return tokens
