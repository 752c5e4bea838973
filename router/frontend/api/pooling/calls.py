"""Endpoints ``/score``, ``/rerank`` and ``/pooling``: each text is an input of an embedding."""

from collections.abc import Mapping

from fastapi import Response

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

    for path in ("/score", "/v1/score"):
        calls.serve(api, path, ScoreBody, "score", _PooledCalls.score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        calls.serve(api, path, RerankBody, "rerank", _PooledCalls.rerank)
    calls.serve(api, "/pooling", PoolingBody, "pooling", _PooledCalls.pooling)
    return api


class _PooledCalls(Calls):
    async def score(self, body: ScoreBody, arrival: Arrival) -> Response:
        """Compute the similarity of texts, which is the cosine of their vectors."""
        left, right = body.sides()
        texts: dict[str, str | list[int]] = {f"text_1[{i}]": text for i, text in enumerate(left)}
        texts |= {f"text_2[{i}]": text for i, text in enumerate(right)}
        pairs = [(index % len(left), len(left) + index) for index in range(len(right))]
        return await self._pooled("score", body, texts, scored(pairs), arrival)

    async def rerank(self, body: RerankBody, arrival: Arrival) -> Response:
        """Sort documents by their similarity to a query, most similar first."""
        texts: dict[str, str | list[int]] = {"query": body.query}
        texts |= {f"documents[{i}]": text for i, text in enumerate(body.texts())}
        return await self._pooled("rerank", body, texts, ranked(body), arrival)

    async def pooling(self, body: PoolingBody, arrival: Arrival) -> Response:
        """Compute the pooled vector of each input."""
        texts = {f"input[{i}]": text for i, text in enumerate(body.inputs())}
        return await self._pooled("pooling", body, texts, pooled(body), arrival)

    async def _pooled(
        self,
        endpoint: str,
        body: PooledBody,
        texts: Mapping[str, str | list[int]],
        write: Write,
        arrival: Arrival,
    ) -> Response:
        """Return the response for ``texts`` by their names in errors."""
        model = arrival.lane.model
        how = await off_loop(arrival.size_bytes, lambda: _how(model, body, texts))
        context, requests = await self.embedding_requests(endpoint, how, arrival)
        return PooledAnswer(context, requests, how, write)


def _how(
    model: ServedModel, body: PooledBody, texts: Mapping[str, str | list[int]]
) -> EmbeddingBody:
    most = body.most_tokens
    encoded = [_tokens(model, text, name, most) for name, text in texts.items()]
    shared = {name: value for name, value in body if name in EmbeddingBody.model_fields}
    # The texts are already validated.
    cut_to = {"input": encoded, "truncate_prompt_tokens": None}
    return EmbeddingBody.model_construct(**shared | cut_to)


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
