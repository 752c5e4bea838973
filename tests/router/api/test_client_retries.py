"""The official clients repeat what may succeed, and give up what fails again: by their own code."""

from collections.abc import Iterator

import anthropic
import openai
import pytest
from httpx2 import Response  # the clients'

from baton.types import errors
from router.frontend.api.messages.errors import MESSAGES_ERRORS
from router.frontend.errors import OPENAI_ERRORS, error_response

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
