"""Requests past Baton, as far as their placement depends on their bodies.

The server judges them: one whose prompt Baton cannot render is placed by loads alone.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any

from baton.types.errors import BatonError, InvalidRequestError
from baton.types.params import SamplingParams
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.common import INT32, ModelBody
from router.frontend.api.bodies.completion import CompletionBody
from router.frontend.api.bodies.parse import checked, decoded
from router.frontend.api.caller import Caller
from router.frontend.api.messages import translate as messages
from router.frontend.api.messages.body import CountTokensBody
from router.frontend.api.prepare import Preparer
from router.frontend.api.responses import translate as responses
from router.frontend.api.responses.body import InputTokensBody
from router.lane import Lane
from router.lanes.lane_table import LaneTable
from router.request import GenerationRequest

_CALLER = Caller(tenant="", mode="colocated", timeout_s=0.0)
_MOST_CHOICES = 128
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def _chat(body: Any, lane: Lane) -> Sequence[int]:
    return Preparer(lane.model, lane.settings, lane.core).chat_prompt(body, _CALLER)


def _completion(body: Any, lane: Lane) -> Sequence[int]:
    special = body.add_special_tokens is not False
    return lane.model.encode_prompt(body.prompts()[0], special=special, whole=False)


def _message(body: Any, lane: Lane) -> Sequence[int]:
    return _chat(messages.chat_of(body).chat(), lane)


def _response(body: Any, lane: Lane) -> Sequence[int]:
    return _chat(responses.chat_of(body, (), body.items()).chat(), lane)


_PATHS: Mapping[str, tuple[type[ModelBody], Callable[[Any, Lane], Sequence[int]]]] = {
    "/v1/chat/completions": (ChatBody, _chat),
    "/v1/completions": (CompletionBody, _completion),
    "/v1/messages": (CountTokensBody, _message),
    "/v1/responses": (InputTokensBody, _response),
}
"""Class of the fields that determine the prompt, and the function that returns its tokens."""


def read_request(path: str, body: bytes, lanes: LaneTable) -> tuple[Lane, GenerationRequest]:
    """Return a request and its lane. Large bodies take time: see ``off_loop``.

    Raises:
        InvalidRequestError: The body is not a JSON object.
        ModelNotFoundError: Its model is not served.
    """
    is_known = path in _PATHS and bool(body)
    data = decoded(body) if is_known else {}
    name = data.get("model") or lanes.first.model.names[0]
    if not isinstance(name, str):
        raise InvalidRequestError.at("model", "must be a string")
    lane = lanes.of(name)
    salt = data.get("cache_salt")
    now_ns = monotonic_ns()
    return lane, GenerationRequest(
        request_id=f"past-{secrets.token_hex(8)}",
        prompt=_prompt(path, data, lane) if is_known else (),
        sampling=SamplingParams(
            max_tokens=min(_number(data, limit, INT32) for limit in _LIMITS),
            n=min(_number(data, "n", 1), _MOST_CHOICES),
        ),
        cache_scope=salt if isinstance(salt, str) else "",
        mode="colocated",
        arrived_ns=now_ns,
        deadline_ns=now_ns,
        past_baton=True,
    )


def _prompt(path: str, data: dict[str, Any], lane: Lane) -> tuple[int, ...]:
    """Return the first prompt; empty if it cannot be rendered, or only a server has its begin."""
    if data.get("previous_response_id") is not None:
        return ()
    kind, tokens = _PATHS[path]
    fields = {name: value for name, value in data.items() if name in kind.model_fields}
    try:
        return tuple(tokens(checked(kind, fields, model=lane.model.names[0]), lane))
    except (BatonError, IndexError):
        return ()


def _number(data: Mapping[str, Any], name: str, default: int) -> int:
    value = data.get(name)
    return min(value, INT32) if isinstance(value, int) and value > 0 else default
