"""Deviations of Baton's answers from the specifications, each with its reason.

A deviation that is not in `DEVIATIONS` fails the tests, and so does one that no longer occurs.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.conformance.cases import COMPLETIONS, EMBEDDINGS
from tests.conformance.judge import NULL, UNKNOWN, Finding

TYPE = "type"
ENUM = "enum"
_RESPONSES = "* /v1/responses*"
_MESSAGES = "* /v1/messages*"
_BATCHES = "* /v1/batches*"
_MODELS = "GET /v1/models*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Deviation of the same kind at fields of one or more calls.

    Attributes:
        calls: Pattern of the calls, in which ``*`` is any text.
        at: Patterns of JSON pointers. A ``*`` is any index, and at the beginning any place.
        kind: `UNKNOWN`: the specification has no such field. `NULL`: it has no null there.
            `TYPE` and `ENUM`: it has another type, or other values.
    """

    calls: str
    at: tuple[str, ...]
    kind: str
    reason: str

    def covers(self, call: str, at: str, finding: Finding) -> bool:
        """Return whether this is the deviation at ``at``, one of its own pointers."""
        same_place = fnmatchcase(call, self.calls) and fnmatchcase(finding.at, at)
        return same_place and finding.what == self.kind


DEVIATIONS = (
    Deviation(
        calls="POST /v1/*completions",
        at=("/choices/*/stop_reason",),
        kind=UNKNOWN,
        reason="vLLM's field: the stop text or the id of the stop token.",
    ),
    Deviation(
        calls="POST /v1/chat/completions",
        at=("/choices/*/message/reasoning_content", "/choices/*/delta/reasoning_content"),
        kind=UNKNOWN,
        reason="vLLM's field: the thinking. OpenAI's chat has no field for it.",
    ),
    Deviation(
        calls="POST /v1/chat/completions",
        at=("/choices/*/delta/tool_calls/*/type",),
        kind=ENUM,
        reason="A call of a custom tool. The document describes it only in whole answers.",
    ),
    Deviation(
        calls="POST /v1/chat/completions",
        at=("/choices/*/delta/tool_calls/*/custom",),
        kind=UNKNOWN,
        reason="A call of a custom tool. The document describes it only in whole answers.",
    ),
    Deviation(
        calls=_RESPONSES,
        at=("*/tools/*/tools/*/parameters/*",),
        kind=UNKNOWN,
        reason="The schema of a function in a namespace, which the document leaves without fields.",
    ),
    Deviation(
        calls=_MESSAGES,
        at=("/context_management",),
        kind=UNKNOWN,
        reason="Field of Anthropic's beta of context editing, sent only if the request has edits.",
    ),
    Deviation(
        calls=COMPLETIONS,
        at=("/choices/*/finish_reason", "/usage"),
        kind=NULL,
        reason="Null in chunks before the last. The document describes only whole answers.",
    ),
    Deviation(
        calls=COMPLETIONS,
        at=("/choices/*/logprobs/token_logprobs/*", "/choices/*/logprobs/top_logprobs/*"),
        kind=NULL,
        reason="The first token of an echoed prompt has no log-probability.",
    ),
    Deviation(
        calls=EMBEDDINGS,
        at=("/data/*/embedding",),
        kind=TYPE,
        reason="A text if the request has `encoding_format: base64`. The schema has no such form.",
    ),
    Deviation(
        calls=_MODELS,
        at=("*/root", "*/max_model_len"),
        kind=UNKNOWN,
        reason="vLLM's fields: the name without adapters, and the limit of the context.",
    ),
    Deviation(
        calls=_MODELS,
        at=(
            "*/source",
            "*/format",
            "*/revision",
            "*/license",
            "*/architecture",
            "*/context_tokens",
            "*/vocab_size",
            "*/dtype",
            "*/quantisation",
            "*/weights_digest",
            "*/tokenizer_digest",
            "*/template_digest",
            "*/generation_defaults",
            "*/emulated",
        ),
        kind=UNKNOWN,
        reason="Baton's record of the model.",
    ),
    Deviation(
        calls=_RESPONSES,
        at=("*/input_tokens_details/cache_write_tokens",),
        kind=UNKNOWN,
        reason="Newer than the document. OpenAI's Python SDK requires it.",
    ),
    Deviation(
        calls=_RESPONSES,
        at=("*/store",),
        kind=UNKNOWN,
        reason="In the document's examples, but not in its schema.",
    ),
    Deviation(
        calls=_RESPONSES,
        at=("*/usage", "*/user", "*/prompt_cache_key", "*/safety_identifier"),
        kind=NULL,
        reason="Null if there is none. The document's examples have null in `usage` and `user`.",
    ),
    Deviation(
        calls=_RESPONSES,
        at=("/response/error/type",),
        kind=UNKNOWN,
        reason="Baton's code of the error. The values of `code` are OpenAI's closed list.",
    ),
    Deviation(
        calls=_BATCHES,
        at=(
            "*/errors",
            "*/output_file_id",
            "*/error_file_id",
            "*/in_progress_at",
            "*/finalizing_at",
            "*/completed_at",
            "*/failed_at",
            "*/expired_at",
            "*/cancelling_at",
            "*/cancelled_at",
        ),
        kind=NULL,
        reason="Null if there is none, as in the document's examples.",
    ),
    Deviation(
        calls=_MESSAGES,
        at=("/error/details",),
        kind=UNKNOWN,
        reason="The SDK reads `details.error_code`, but its types have no such field.",
    ),
    Deviation(
        calls=_MESSAGES,
        at=("/error/type",),
        kind=ENUM,
        reason="`request_too_large` with status 413. Anthropic documents it; the SDK has no type.",
    ),
)
