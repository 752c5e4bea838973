"""Way of the KV of prompts from one vLLM to another, as the engine uses it."""

from baton.engine.remote.live_request import LiveRequest, Parameters


class HandOff:
    """Way of KV between vLLMs.

    Attributes:
        repeats: Whether the KV of a prompt can be sent again after a failed load.
    """

    repeats = True

    def take(self, request: LiveRequest) -> bool:
        """Make room for the KV of a prompt for another worker; return whether there is enough."""
        return True

    def bind(self, request: LiveRequest) -> None:
        """Make room for KV that another worker sends, and report the room when there is enough."""

    def release(self, request: LiveRequest) -> None:
        """Free the room of a request, as soon as vLLM writes no more into it."""

    def to_save(self, request: LiveRequest, choice: int) -> Parameters | None:
        """Return the parameters with which vLLM keeps a prompt's KV; None if it need not."""
        raise NotImplementedError

    async def until_written(self, request: LiveRequest, response: bytes) -> None:
        """Wait after a response to ``to_save`` until vLLM writes no more of the prompt's KV."""

    def held(self, request: LiveRequest, returned: Parameters | None) -> Parameters:
        """Return what another vLLM needs of what vLLM returned for a prompt that it had to keep.

        Raises:
            InternalError: vLLM does not hold the KV of the whole prompt.
        """
        raise NotImplementedError

    def publish(self, request: LiveRequest) -> bytes:
        """Let another worker read the KV of a prompt; return the parameters for its vLLM."""
        raise NotImplementedError

    def to_load(self, request: LiveRequest, data: bytes) -> list[Parameters]:
        """Return the parameters with which vLLM loads the KV, by choice.

        ``data`` is what ``publish`` returned at the other worker.

        Raises:
            InternalError: The data is not of this request.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop to receive reports of vLLM."""
