"""For each call: what comes back, and an example of what to send."""

from typing import Any, NamedTuple

from pydantic import BaseModel

from router.frontend.openapi import answers, batch_answers, newer_answers

_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


class Call(NamedTuple):
    """One call as the description tells of it.

    Attributes:
        answer: The body of a 200; None: it has none, or none of a fixed shape.
        kind: Its media type.
        event: The data of a stream's events, where the call can stream.
        example: A body to send; ``MODEL`` stands for the served name.
        open: Needs no key where the fleet has keys.
        error: The body of an error.
    """

    answer: type[BaseModel] | None = None
    kind: str = "application/json"
    event: type[BaseModel] | None = None
    example: dict[str, Any] | None = None
    open: bool = False
    error: type[BaseModel] = answers.Error


def _rerank(**example: Any) -> Call:
    documents = ["Paris is the capital of France.", "Berlin is in Germany."]
    return Call(
        answers.Ranking,
        example={"model": "MODEL", "query": "capital of France", "documents": documents, **example},
    )


_SCORE = Call(
    answers.ScoreList,
    example={"model": "MODEL", "text_1": "a cat", "text_2": ["a kitten", "a lorry"]},
)
_ANY = Call(None)
_HEALTH = Call(None, kind="", open=True)

CALLS: dict[tuple[str, str], Call] = {
    ("post", "/v1/chat/completions"): Call(
        answers.ChatCompletion,
        event=answers.ChatCompletionChunk,
        example={"model": "MODEL", "messages": _MESSAGES, "max_tokens": 32},
    ),
    ("post", "/v1/completions"): Call(
        answers.TextCompletion,
        event=answers.TextCompletion,
        example={"model": "MODEL", "prompt": "The capital of France is", "max_tokens": 8},
    ),
    ("post", "/v1/embeddings"): Call(
        answers.EmbeddingList, example={"model": "MODEL", "input": ["a cat", "a kitten"]}
    ),
    ("post", "/v1/responses"): Call(
        newer_answers.ResponseObject,
        event=newer_answers.NamedEvent,
        example={
            "model": "MODEL",
            "input": "What is the capital of France?",
            "max_output_tokens": 32,
        },
    ),
    ("post", "/v1/responses/input_tokens"): Call(
        newer_answers.InputTokens,
        example={"model": "MODEL", "input": "What is the capital of France?"},
    ),
    ("get", "/v1/responses/{response_id}"): Call(newer_answers.ResponseObject),
    ("delete", "/v1/responses/{response_id}"): Call(newer_answers.DeletedResponse),
    ("post", "/v1/responses/{response_id}/cancel"): Call(newer_answers.ResponseObject),
    ("get", "/v1/responses/{response_id}/input_items"): Call(newer_answers.InputItems),
    ("post", "/v1/messages"): Call(
        newer_answers.MessagesAnswer,
        event=newer_answers.NamedEvent,
        example={"model": "MODEL", "max_tokens": 32, "messages": _MESSAGES},
        error=newer_answers.MessagesError,
    ),
    ("post", "/v1/messages/count_tokens"): Call(
        newer_answers.InputTokens,
        example={"model": "MODEL", "messages": _MESSAGES},
        error=newer_answers.MessagesError,
    ),
    ("post", "/v1/score"): _SCORE,
    ("post", "/score"): _SCORE,
    ("post", "/v1/rerank"): _rerank(top_n=1),
    ("post", "/v2/rerank"): _rerank(max_tokens_per_doc=512),
    ("post", "/rerank"): _rerank(),
    ("post", "/pooling"): Call(
        answers.PooledList, example={"model": "MODEL", "input": ["a cat"], "dimensions": 4}
    ),
    ("get", "/v1/models"): Call(answers.ModelList),
    ("get", "/v1/models/{model_id}"): Call(answers.ModelCard),
    ("post", "/tokenize"): Call(
        answers.TokenList, example={"prompt": "Hello, world!", "return_token_strs": True}
    ),
    ("post", "/detokenize"): Call(answers.TokenText, example={"tokens": [19556, 28, 905, 17]}),
    ("post", "/v1/load_lora_adapter"): Call(
        None, kind="text/plain", example={"lora_name": "pirate", "lora_path": "/srv/lora/pirate"}
    ),
    ("post", "/v1/unload_lora_adapter"): Call(
        None, kind="text/plain", example={"lora_name": "pirate"}
    ),
    ("post", "/v1/files"): Call(batch_answers.FileObject),
    ("get", "/v1/files"): Call(batch_answers.FileList),
    ("get", "/v1/files/{file_id}"): Call(batch_answers.FileObject),
    ("delete", "/v1/files/{file_id}"): Call(batch_answers.DeletedFile),
    ("get", "/v1/files/{file_id}/content"): Call(None, kind="application/octet-stream"),
    ("post", "/v1/batches"): Call(
        batch_answers.Batch,
        example={"input_file_id": "file-0", "endpoint": "/v1/chat/completions"},
    ),
    ("get", "/v1/batches"): Call(batch_answers.BatchList),
    ("get", "/v1/batches/{batch_id}"): Call(batch_answers.Batch),
    ("post", "/v1/batches/{batch_id}/cancel"): Call(batch_answers.Batch),
    ("get", "/health"): _HEALTH,
    ("get", "/ping"): _HEALTH,
    ("post", "/ping"): _HEALTH,
    ("get", "/health/live"): Call(answers.Liveness, open=True),
    ("get", "/health/ready"): Call(answers.Readiness, open=True),
    ("get", "/version"): Call(answers.Version, open=True),
    ("get", "/load"): Call(answers.Load),
    ("get", "/metrics"): Call(None, kind="text/plain"),
    ("get", "/fleet"): _ANY,
    ("get", "/fleet/targets"): _ANY,
    ("get", "/fleet/series"): _ANY,
    ("get", "/fleet/requests"): _ANY,
    ("get", "/fleet/requests/{request_id}"): _ANY,
}
