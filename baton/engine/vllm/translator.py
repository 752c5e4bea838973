"""Connection of a worker's shell to the vLLM that its engine process has started.

The shell itself talks to vLLM: a token passes no process between them.
"""

from collections.abc import Callable

import msgspec

from baton.engine.process.client import EngineClient
from baton.engine.process.link import InnerLink
from baton.engine.settings import EngineSettings
from baton.engine.vllm import server
from baton.engine.vllm.control import VllmControl
from baton.engine.vllm.engine import VllmEngine, VllmParts
from baton.engine.vllm.events_client import EventPrefixes, KvEventsClient
from baton.engine.vllm.facts import VllmFacts
from baton.engine.vllm.hand_off import HandOff
from baton.engine.vllm.hand_off_baton import BatonHandOff
from baton.engine.vllm.hand_off_nixl import NixlHandOff
from baton.model.model_config import ModelConfig


class RunningVllm(msgspec.Struct, frozen=True):
    """A vLLM that an engine process has started; ``folder`` has its sockets."""

    folder: str
    facts: VllmFacts
    config: ModelConfig


class VllmLink(InnerLink):
    """Connection to a vLLM, with the pool of the engine process that has started it.

    Args:
        client: Connection to the engine process.
        settings: Settings of the process.
    """

    def __init__(self, client: EngineClient, settings: EngineSettings) -> None:
        super().__init__(client.ready)
        self.pool_fd = client.pool_fd
        self.pools = client.pools
        self.pool_geometry = client.pool_geometry
        running = msgspec.msgpack.decode(client.ready.running, type=RunningVllm)
        folder = running.folder
        facts = running.facts
        tier_bytes = settings.kv_tiers.memory_mb << 20
        origin = server.origin_in(folder)
        origin.keeps = True
        control = VllmControl(origin, client.exited.done)
        prefixes = event_prefixes(folder, facts, self.report, has_tier=tier_bytes > 0)
        parts = VllmParts(origin, control, prefixes, hand_off_of(folder, facts, self.report))
        serves_adapters = settings.external is not None and settings.external.adapters
        most = settings.max_adapters * serves_adapters
        engine = VllmEngine(self.report, parts, facts, running.config, most)
        if tier_bytes:
            blocks = tier_bytes // self.pool_geometry.block_bytes
            engine.show_tier(lambda: prefixes.tier_blocks, blocks)
        self.handle = engine.handle
        self.close = engine.close
        engine.broken.add_done_callback(lambda broken: self._end(broken.result(), 1))
        client.exited.add_done_callback(lambda exited: self._end(client.fatal, exited.result()))

    def _end(self, why: str, code: int) -> None:
        if not self.exited.done():
            self.fatal = why
            self.exited.set_result(code)


def event_prefixes(
    folder: str, facts: VllmFacts, send: Callable[..., None], *, has_tier: bool = False
) -> EventPrefixes:
    """Return what a vLLM that was started with this folder has cached."""
    endpoints = (f"ipc://{folder}/events", f"ipc://{folder}/replay")
    client = KvEventsClient(*endpoints, has_tier=has_tier)
    return EventPrefixes(client, facts.block_tokens, send)


def hand_off_of(folder: str, facts: VllmFacts, send: Callable[..., None]) -> HandOff:
    """Return the way of KV between vLLMs that were started so."""
    if facts.hand_off.startswith("baton/"):
        return BatonHandOff(folder, facts, send)
    return NixlHandOff(facts.block_tokens)
