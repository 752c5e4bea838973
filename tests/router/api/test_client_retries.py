"""The official clients repeat what may succeed, and give up what fails again: by their own code.

They raise what they raise for the same fault of OpenAI and Anthropic, and wait as long. LiteLLM and
LangChain are tried in ``tests/clients``.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from httpx2 import Request, Response  # the clients'

from baton.types import errors
from router.frontend.api.messages.errors import MESSAGES_ERRORS
from router.frontend.errors import OPENAI_ERRORS, error_response
from tests.router.conftest import MODEL

# Of a fault nothing is known, and a slow body may be fast the next time.
MAY_BE_REPEATED = {errors.InternalError, errors.SlowRequestError}


def tree(root: type[errors.BatonError]) -> Iterator[type[errors.BatonError]]:
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
            yield from tree(child)


def made(kind: type[errors.BatonError], retry_after_s: float = 2.0) -> errors.BatonError:
    if issubclass(kind, errors.QueueFullError):
        return kind("no", retry_after_s=retry_after_s)
    return kind("no")


def repeats(error: errors.BatonError) -> set[bool]:
    """Return whether each of the two clients would send the request again."""
    clients = (
        (openai.OpenAI(api_key="k"), OPENAI_ERRORS),
        (anthropic.Anthropic(api_key="k"), MESSAGES_ERRORS),
    )
    answers = ((client, error_response(error, shape=shape)) for client, shape in clients)
    return {
        client._should_retry(Response(answer.status_code, headers=answer.headers.items()))
        for client, answer in answers
    }


@pytest.mark.parametrize("kind", dict.fromkeys(tree(errors.BatonError)))
def test_clients_repeat_what_is_worth_repeating(kind: type[errors.BatonError]) -> None:
    expected = kind.retryable or kind in MAY_BE_REPEATED
    assert repeats(made(kind)) == {expected}, kind.__name__


def test_clients_do_not_repeat_what_needs_a_day() -> None:
    """Anthropic's would wait for a day within one call."""
    assert repeats(made(errors.InsufficientQuotaError, 3600.0)) == {False}
    assert repeats(made(errors.RateLimitError, 119.0)) == {True}


class Fault(NamedTuple):
    """A fault, and how OpenAI (code, type) and Anthropic (type) answer it, as they document."""

    ours: type[errors.BatonError]
    status: int
    code: str | None
    kind: str
    of_anthropic: tuple[int, str]


INVALID = "invalid_request_error"
FAULTS = (
    Fault(errors.InvalidRequestError, 400, None, INVALID, (400, INVALID)),
    Fault(errors.PromptTooLongError, 400, "context_length_exceeded", INVALID, (400, INVALID)),
    Fault(
        errors.UnauthorizedError, 401, "invalid_api_key", INVALID, (401, "authentication_error")
    ),
    Fault(errors.ForbiddenError, 403, None, INVALID, (403, "permission_error")),
    Fault(errors.ModelNotFoundError, 404, "model_not_found", INVALID, (404, "not_found_error")),
    Fault(errors.SlowRequestError, 408, None, INVALID, (408, "timeout_error")),
    Fault(errors.PayloadTooLargeError, 413, None, INVALID, (413, "request_too_large")),
    Fault(
        errors.RateLimitError, 429, "rate_limit_exceeded", "rate_limit_error",
        (429, "rate_limit_error"),
    ),
    Fault(
        errors.InsufficientQuotaError, 429, "insufficient_quota", "insufficient_quota",
        (429, "rate_limit_error"),
    ),
    Fault(errors.InternalError, 500, None, "server_error", (500, "api_error")),
    Fault(errors.UnavailableError, 503, None, "server_error", (529, "overloaded_error")),
    Fault(errors.DeadlineError, 504, None, "server_error", (504, "timeout_error")),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.ours.__name__)
@pytest.mark.parametrize("module", [openai, anthropic])
def test_clients_raise_what_they_raise_for_the_original_service(module: Any, fault: Fault) -> None:
    is_openai = module is openai
    client = module.OpenAI(api_key="k") if is_openai else module.Anthropic(api_key="k")
    shape = OPENAI_ERRORS if is_openai else MESSAGES_ERRORS
    answer = error_response(made(fault.ours), shape=shape)
    status, kind = (fault.status, fault.kind) if is_openai else fault.of_anthropic
    error: dict[str, Any] = {"message": "no", "type": kind}
    body: dict[str, Any] = {"error": error | {"param": None, "code": fault.code}}
    if not is_openai:
        body = {"type": "error", "error": error, "request_id": "req_1"}
    url = module.BASE_URL if hasattr(module, "BASE_URL") else "https://api.example"
    sent = module._models.FinalRequestOptions(method="post", url=url)
    sent_for = Request("POST", url)
    headers = {"retry-after": "2"} if status == 429 else {}
    original = Response(status, json=body, headers=headers, request=sent_for)
    own = Response(
        answer.status_code, content=answer.body, headers=answer.headers.items(), request=sent_for
    )
    theirs, ours = (client._make_status_error_from_response(each) for each in (original, own))
    assert type(ours) is type(theirs)
    assert client._should_retry(own) == client._should_retry(original)
    if status == 429:
        waits = (client._calculate_retry_timeout(2, sent, each.headers) for each in (original, own))
        assert set(waits) == {2.0}
    if is_openai:
        assert (ours.type, ours.code) == (theirs.type, fault.code or ours.code)
    else:
        assert ours.body["error"]["type"] == theirs.body["error"]["type"]
        assert ours.type == theirs.type


LONG = "hello world " * 9000
CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": [5] * 20_000}),
        ("/v1/completions", {"prompt": "many letters" * 90_000}),
    ],
)
async def test_clients_read_by_how_much_a_prompt_is_too_long(make_fleet, path, body):
    """They compact or fall back by texts, not by codes: LiteLLM 1.109 (`exception_mapping_utils`),
    langchain-openai 1.7 and langchain-anthropic 1.7, Claude Code 2.1 (`CODE`)."""
    fleet = await make_fleet({"decode-0": None})
    answer = await fleet.http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "this model's maximum context length is 8192 tokens" in message
    found = CODE.search(message)
    assert found is not None, message
    assert int(found[1]) > int(found[2])
