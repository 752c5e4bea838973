"""An attached llama-server: its properties, its examination, and its engine.

It cannot keep the caches of tenants apart. So once two tenants that share no cache have used it, no
request uses cached prefixes any more; see ``docs/guide/attached.md``.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import msgspec

from baton.engine.core.sequence import RequestSpec
from baton.engine.llama_server import protocol
from baton.engine.llama_server.pieces import TokenPieces
from baton.engine.llama_server.protocol import CompletionStream
from baton.engine.loading.memory import kv_geometry
from baton.engine.process import messages
from baton.engine.remote.attached import (
    AttachedEngine,
    Endpoints,
    EngineDescription,
    ServerFacts,
    ServerKind,
    UnfitServerError,
    needs_key,
)
from baton.engine.remote.cached_prefixes import ApproximatePrefixes
from baton.engine.remote.http import HttpOrigin, StatusError
from baton.engine.remote.live_request import LiveRequest, Parameters
from baton.engine.remote.others import ServerLoad
from baton.engine.remote.response import ResponseReader
from baton.model.artifact import ModelArtifact
from baton.text.tokenizer import load_tokenizer
from baton.types.errors import BatonError, UnavailableError
from baton.types.geometry import BLOCK_TOKENS

_ANSWER_S = 5.0
_CHECK_S = 30.0  # for one token, the queue of a busy server included
_SAMPLE = "The 3 naïve cafés in Zürich sold 12,345 🍊.\n\n\tdef f(x):\n"


class _Settings(msgspec.Struct, frozen=True):
    n_ctx: int


class _Props(msgspec.Struct, frozen=True):
    default_generation_settings: _Settings
    total_slots: int
    model_path: str
    build_info: str


class _Tokens(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]


class _Slot(msgspec.Struct, frozen=True):
    is_processing: bool


async def read_facts(origin: HttpOrigin) -> ServerFacts:
    """Return the present properties of a llama-server.

    Raises:
        UnavailableError: It does not respond, or still loads its model.
        UnfitServerError: It does not report what Baton needs.
    """
    status, _, raw = await origin.ask("GET", "/props", _ANSWER_S)
    if status in (401, 403):
        raise needs_key(origin)
    if status == 503:
        raise UnavailableError(f"{origin.name} still loads its model")
    try:
        props = msgspec.json.decode(raw, type=_Props)
    except msgspec.DecodeError as error:
        raise UnfitServerError(
            f"{origin.name} is no llama-server with a model: /props has status {status}: {error}"
        ) from None
    return ServerFacts(
        engine=f"llama-server/{props.build_info}",
        model=props.model_path.rpartition("/")[2],
        root=props.model_path,
        max_context_tokens=props.default_generation_settings.n_ctx,
        block_tokens=BLOCK_TOKENS,
        blocks=props.total_slots * props.default_generation_settings.n_ctx // BLOCK_TOKENS,
    )


async def read_load(origin: HttpOrigin) -> ServerLoad:
    """Return the load by the slots; no load if the server's loop does not answer.

    Raises:
        UnavailableError: The server has no such page.
    """
    try:
        raw = await origin.fetch("GET", "/slots", _ANSWER_S)
        slots = msgspec.json.decode(raw, type=tuple[_Slot, ...])
    except StatusError:
        raise
    except msgspec.DecodeError as error:
        raise UnavailableError(f"{origin.name} has odd slots: {error}") from None
    except UnavailableError:
        return ServerLoad(is_whole=False)
    running = sum(slot.is_processing for slot in slots)
    return ServerLoad(running, work=zlib.crc32(raw), is_whole=False)


class AttachedLlamaServer(AttachedEngine):
    """Live requests of one attached llama-server.

    Args:
        send: Sends reports to the shell.
        origin: The server.
        facts: Properties with which it was examined.
        artifact: The model, whose tokenizer is the server's.
    """

    target = protocol.COMPLETION
    kind = protocol.SERVER
    refused = protocol.REFUSED
    shares_blocks = False  # each slot has its own

    def __init__(
        self,
        send: Callable[..., None],
        origin: HttpOrigin,
        facts: ServerFacts,
        artifact: ModelArtifact,
    ) -> None:
        self._cached = ApproximatePrefixes(facts.blocks, BLOCK_TOKENS, send, by_slot=True)
        config = artifact.config
        super().__init__(send, origin, self._cached, facts.blocks, config.vocab_size)
        self._artifact = artifact
        self._context_tokens = facts.max_context_tokens
        self._eos = config.eos_token_ids
        self._seed: bytes | None = None  # of the only tenants that have used the server
        self._is_shared = False  # others have used it, too
        self._look_after(facts, partial(read_facts, origin), partial(read_load, origin))

    @cached_property
    def _pieces(self) -> TokenPieces:
        return TokenPieces(load_tokenizer(self._artifact.tokenizer))

    def _refusal(self, spec: RequestSpec) -> BatonError | None:
        return protocol.refusal(spec)

    def _start(self, command: messages.Submit) -> None:
        self._note_tenant(command.spec)
        super()._start(command)

    def _note_tenant(self, spec: RequestSpec) -> None:
        """Stop using cached prefixes when a second tenant comes."""
        if not spec.cacheable or self._is_shared:
            return
        if self._seed is None:
            self._seed = spec.hash_seed
        elif self._seed != spec.hash_seed:
            self._is_shared = True
            self._cached.disable()

    def _body(self, request: LiveRequest, choice: int, parameters: Parameters | None) -> bytes:
        cached = request.spec.cacheable and not self._is_shared
        return protocol.completion_body(
            request.prompt, request.spec, choice, cached=cached, context_tokens=self._context_tokens
        )

    def _reader(self, request: LiveRequest, choice: int) -> ResponseReader:
        return CompletionStream(
            request.submit.request_id,
            choice,
            request.spec,
            self._eos,
            lambda text, count: self._pieces.split(text, count),
            lambda token: self._pieces.spell(token),
        )

    async def _erase(self) -> bool:
        """Return False: its prompt cache in memory cannot be erased."""
        return False

    def _take(self, request: LiveRequest, choice: int, reader: ResponseReader, body: bytes) -> None:
        super()._take(request, choice, reader, body)
        is_early = isinstance(reader, CompletionStream) and reader.is_early
        if is_early and choice in request.open_choices:
            request.exchanges[choice].close()
            self._complete(request, choice, reader)


@dataclass(frozen=True, slots=True)
class LlamaServers(ServerKind):
    """llama-servers of a model; see `ServerKind`.

    Attributes:
        artifact: The model, whose weights are not read.
    """

    artifact: ModelArtifact
    keeps_connections: ClassVar[bool] = False  # a server gives each a thread

    async def examine(self, origin: HttpOrigin) -> ServerFacts:
        """Return the properties of a llama-server that has all that Baton needs."""
        await origin.fetch("GET", "/health", _ANSWER_S)
        facts = await read_facts(origin)
        body = msgspec.json.encode({"content": _SAMPLE, "add_special": False})
        raw = await origin.fetch("POST", "/tokenize", _ANSWER_S, body)
        theirs = list(msgspec.json.decode(raw, type=_Tokens).tokens)
        ours = load_tokenizer(self.artifact.tokenizer).encode(_SAMPLE)
        if theirs != ours:
            raise UnfitServerError(
                f"{origin.name} serves {facts.model}, whose tokens are not those of "
                f"{self.artifact.source}: start `llama-server -m` with the file that is `model` "
                "here, or change `model`"
            )
        check = {"prompt": ours[:4], "n_predict": 1, "cache_prompt": False, "return_tokens": True}
        raw = await origin.fetch("POST", protocol.COMPLETION, _CHECK_S, msgspec.json.encode(check))
        event = protocol.read_event(raw)
        if event.timings is None or event.timings.cache_n is None or not event.stop:
            raise UnfitServerError(
                f"{origin.name} ({facts.engine}) reports no cached tokens: Baton needs llama.cpp "
                "b6500 or newer"
            )
        return facts

    def describe(self, facts: ServerFacts) -> EngineDescription:
        """Return the properties with which its worker is registered."""
        geometry = kv_geometry(self.artifact.config, "fp16", facts.blocks)
        return EngineDescription(f"{facts.engine}/{facts.model}", geometry)

    def engine(
        self,
        send: Callable[..., None],
        origin: HttpOrigin,
        facts: ServerFacts,
        endpoints: Endpoints,
    ) -> AttachedEngine:
        """Return the engine of a server."""
        return AttachedLlamaServer(send, origin, facts, self.artifact)
