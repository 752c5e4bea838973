"""The fields of scores, rankings and pooling, as ``docs/parameters.md`` shows them."""

from router.frontend.api.bodies.fields import Fields, Refused
from router.frontend.api.bodies.parameters import VECTORS

_POOLED = VECTORS | Fields(
    honoured={
        "truncate_prompt_tokens": "keep the first so many tokens of each text; -1: what fits",
    },
    refused={
        name: Refused((None, True), "scores are cosines; there is no head to leave it out of")
        for name in ("activation", "softmax", "use_activation")
    },
)

SCORE = _POOLED | Fields(
    title="`POST /v1/score`, `/score`",
    honoured={
        "text_1": "one text, or as many as text_2",
        "text_2": "a text, or several",
        "queries": "as text_1",
        "documents": "as text_2",
    },
)

RERANK = _POOLED | Fields(
    title="`POST /v1/rerank`, `/v2/rerank`, `/rerank`",
    honoured={
        "query": "a text",
        "documents": "up to 2047",
        "top_n": "only the nearest; 0: all",
        "return_documents": "with their texts, unless false",
        "max_tokens_per_doc": "keep the first so many tokens of each text",
    },
    refused={
        "max_chunks_per_doc": Refused((None, 1), "cut documents before they are sent"),
        "rank_fields": Refused((None, ["text"]), "send documents as texts"),
    },
)

DOCUMENT = Fields(
    title="`documents[]` of a ranking",
    honoured={"text": "the document"},
    refused={
        name: Refused((None,), "send text; images are not read")
        for name in ("image", "multi_modal", "content")
    },
)

POOLING = _POOLED | Fields(
    title="`POST /pooling`",
    honoured={
        "input": "a text or token ids, or up to 2048 of them",
        "encoding_format": "float or base64",
        "dimensions": "cut the vector to so many",
        "normalize": "to length 1",
    },
    refused={
        "task": Refused((None, "embed"), "there is one vector for each input, and no other task"),
        "messages": Refused((None,), "send input"),
        "embed_dtype": Refused((None, "float32"), "vectors are float32"),
        "add_special_tokens": Refused((None, True), "send token ids"),
    },
)

TABLE = (SCORE, RERANK, DOCUMENT, POOLING)
