"""Hand-off by vLLM's NixlConnector (``hand_off: nixl``).

The first vLLM computes the prompt, samples the first token and holds the KV under a lease. It
returns parameters, which the second vLLM needs to read the KV from the memory of the first one:

    prompt ──▶ vLLM A ── first token, parameters ──▶ prompt + first token ──▶ vLLM B
                  └───────────────── KV of the prompt, by NIXL ───────────────▶ ┘

B computes the KV of the first token itself: vLLM always computes the last token of what it loads.
So B needs as many blocks as prompt and first token have, which are one more than A holds if the
prompt fills its last block. B reads A's last block twice then, and overwrites the copy.
"""

import msgspec

from baton.engine.remote.live_request import LiveRequest, Parameters
from baton.engine.vllm.hand_off import HandOff
from baton.types.errors import InternalError


class NixlHandOff(HandOff):
    """KV under a lease in a vLLM's memory, from which the other vLLM reads it.

    vLLM lets prompts wait for its memory, and frees it when the other vLLM has read it. It responds
    when the KV is computed, and sends no reports.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def to_save(self, request: LiveRequest, choice: int) -> Parameters:
        """Return the parameters of a prompt whose KV vLLM holds."""
        return {"do_remote_decode": True}

    def held(self, request: LiveRequest, returned: Parameters | None) -> Parameters:
        """Return the parameters, which are of the whole prompt."""
        groups = (returned or {}).get("remote_block_ids")
        is_list = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
        if not returned or not groups or not is_list:
            raise InternalError("vLLM holds no KV for another worker: it has no NixlConnector")
        tokens = returned.get("remote_num_tokens")
        prompt_tokens = len(request.prompt)
        if tokens != prompt_tokens:
            raise InternalError(
                f"vLLM computed {tokens} of {prompt_tokens} prompt tokens for another worker: "
                "hand_off: nixl does not support this model; set `prefill: 0`"
            )
        return returned

    def publish(self, request: LiveRequest) -> bytes:
        """Return the parameters of all choices; empty if no choice needs a transfer."""
        choices = [request.first[choice][1] for choice in range(request.spec.params.n)]
        return msgspec.json.encode(choices) if all(choices) else b""

    def to_load(self, request: LiveRequest, data: bytes) -> list[Parameters]:
        """Return the parameters of all choices, with a block for the first token."""
        wanted = request.spec.params.n
        try:
            choices = msgspec.json.decode(data, type=list[Parameters])
        except msgspec.DecodeError as error:
            raise InternalError(
                f"the parameters of the KV transfer cannot be read: {error}"
            ) from None
        if len(choices) != wanted:
            raise InternalError(
                f"parameters of {len(choices)} KV transfers came for {wanted} choices"
            )
        if len(request.prompt) % self._block_tokens:
            return choices
        return [_with_copy_of_last_block(parameters) for parameters in choices]


def _with_copy_of_last_block(parameters: Parameters) -> Parameters:
    groups = parameters["remote_block_ids"]
    return {**parameters, "remote_block_ids": [[*group, *group[-1:]] for group in groups]}
