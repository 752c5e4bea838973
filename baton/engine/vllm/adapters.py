"""LoRA adapters of one vLLM, loaded by its own calls when a request needs them."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import msgspec

from baton.engine.process import messages
from baton.engine.process.adapter_cache import AdapterRequests
from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm.protocol import adapter_model
from baton.model.lora_artifact import read_same
from baton.model.model_config import ModelConfig
from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import AdapterLoadError, BatonError
from baton.types.params import AdapterRef

_MOST_RANK = 512  # of vLLM
_LOAD_S = 120.0


class VllmAdapters(AdapterRequests):
    """Adapters of one vLLM, and the requests that wait for them.

    Args:
        most: Number of adapters that are loaded at most.
        origin: vLLM's server.
        config: Configuration of the model that the adapters change.
        send: Sends reports to the shell.
        begin: Starts a request whose adapter is loaded.
        tasks: Tasks of the engine.
    """

    def __init__(
        self,
        most: int,
        origin: HttpOrigin,
        config: ModelConfig,
        send: Callable[..., None],
        begin: Callable[[messages.Submit], None],
        tasks: BackgroundTasks,
    ) -> None:
        super().__init__(most, send)
        self._origin = origin
        self._config = config
        self._begin = begin
        self._tasks = tasks
        self._turn = asyncio.Lock()  # vLLM loads and unloads in the order of the decisions

    def add(self, command: messages.Submit, ref: AdapterRef) -> None:
        """Start a request for an adapter as soon as that is loaded."""
        self._cache.add(command.request_id, ref, command)
        self._advance()

    def ended(self, request_id: str) -> None:
        """Note the end of a request, which may have used an adapter."""
        self._cache.ended(request_id)
        self._advance()

    def _advance(self) -> None:
        evicted, to_load, ready = self._cache.advance()
        for digest in evicted:
            self._tasks.spawn(self._unload(digest), "unload adapter")
        for ref in to_load:
            self._tasks.spawn(self._load(ref), "load adapter")
        for command in ready:
            self._begin(command)

    async def _load(self, ref: AdapterRef) -> None:
        began_s = time.monotonic()
        error: BatonError | None = None
        try:
            async with self._turn:
                check = partial(read_same, ref, self._config, _MOST_RANK)
                await asyncio.get_running_loop().run_in_executor(None, check)
                await self._call("load", {"lora_name": adapter_model(ref), "lora_path": ref.path})
        except AdapterLoadError as fault:
            error = fault
        except BatonError as fault:
            error = AdapterLoadError(f"adapter {ref.name}: {fault.message}")
        self._note_load(ref, error, time.monotonic() - began_s)
        self._advance()

    async def _unload(self, digest: str) -> None:
        ref = AdapterRef(self._names.pop(digest), digest, "")
        async with self._turn:
            await self._call("unload", {"lora_name": adapter_model(ref)})
        self._changed(ref, "evicted")

    async def _call(self, verb: str, body: dict[str, str]) -> None:
        target = f"/v1/{verb}_lora_adapter"
        await self._origin.fetch("POST", target, _LOAD_S, msgspec.json.encode(body))
