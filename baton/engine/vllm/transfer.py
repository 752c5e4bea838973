"""KV transfers between two vLLMs by their NixlConnector: parameters and identity, without I/O.

The first vLLM computes the prompt, samples the first token and holds the KV under a lease. It
returns parameters, which the second vLLM needs to read the KV from the memory of the first one:

    prompt ──▶ vLLM A ── first token, parameters ──▶ prompt + first token ──▶ vLLM B
                  └───────────────── KV of the prompt, by NIXL ───────────────▶ ┘

B computes the KV of the first token itself: vLLM always computes the last token of what it loads.
So B needs as many blocks as prompt and first token have, which are one more than A holds if the
prompt fills its last block. B reads A's last block twice then, and overwrites the copy.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.types.errors import InternalError

Parameters = dict[str, Any]
"""``kv_transfer_params`` of one choice, as vLLM returns and takes them."""


def hand_off_id(kind: str, block_tokens: int) -> str:
    """Return what two workers must share to hand over, beside their numerics; "" for no hand-off.

    The numerics id has vLLM's version, which determines the version of the connector.
    """
    return f"{kind}/block{block_tokens}" if kind else ""


def encode(choices: Sequence[Parameters]) -> bytes:
    """Return the parameters of all choices of a request, as they travel."""
    return msgspec.json.encode(choices)


def decode(data: bytes, choices: int) -> list[Parameters]:
    """Return the parameters of all choices: the inverse of ``encode``.

    Raises:
        InternalError: The data is not of this many choices.
    """
    try:
        found = msgspec.json.decode(data, type=list[Parameters])
    except msgspec.DecodeError as error:
        raise InternalError(f"the parameters of the KV transfer cannot be read: {error}") from None
    if len(found) != choices:
        raise InternalError(f"parameters of {len(found)} KV transfers came for {choices} choices")
    return found


def held(parameters: Parameters | None, prompt_tokens: int) -> Parameters:
    """Return what vLLM returned for a prompt whose KV it holds.

    Raises:
        InternalError: It does not hold the KV of the whole prompt.
    """
    if not parameters or not parameters.get("remote_block_ids"):
        raise InternalError("vLLM holds no KV for another worker: it has no NixlConnector")
    tokens = parameters.get("remote_num_tokens")
    if tokens != prompt_tokens:
        raise InternalError(
            f"vLLM computed {tokens} of {prompt_tokens} prompt tokens for another worker: "
            "hand_off: nixl does not support this model; set `prefill: 0`"
        )
    return parameters


def to_load(parameters: Parameters, prompt_tokens: int, block_tokens: int) -> Parameters:
    """Return the parameters for a request of the prompt and its first token."""
    if prompt_tokens % block_tokens:
        return parameters
    groups = parameters["remote_block_ids"]
    return {**parameters, "remote_block_ids": [[*group, *group[-1:]] for group in groups]}
