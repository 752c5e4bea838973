"""A vLLM that Baton did not start: its properties, their check, and its engine.

Nothing here changes the server, but for LoRA adapters, and its cache when a tenant is deleted.
"""

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import msgspec

from baton.engine.core.sequence import RequestSpec
from baton.engine.remote.attached import (
    AttachedEngine,
    Endpoints,
    EngineDescription,
    ServerFacts,
    UnfitServerError,
    needs_key,
)
from baton.engine.remote.cached_prefixes import ApproximatePrefixes, CachedPrefixes
from baton.engine.remote.http import HttpOrigin, StatusError
from baton.engine.remote.live_request import LiveRequest
from baton.engine.vllm import protocol
from baton.engine.vllm.control import VllmControl
from baton.engine.vllm.engine import VllmEngine, VllmParts
from baton.engine.vllm.facts import VllmFacts, hand_off_id
from baton.engine.vllm.hand_off_nixl import NixlHandOff
from baton.engine.vllm.metrics_page import past_step, read_load, read_metrics
from baton.engine.vllm.ranks import OnChange, RankedPrefixes, at_rank
from baton.model.artifact import ModelArtifact
from baton.types.errors import BatonError, InvalidRequestError, UnavailableError
from baton.types.events import StepDone
from baton.types.geometry import BLOCK_TOKENS

_LOG = logging.getLogger(__name__)
_ANSWER_S = 5.0
_CHECK_S = 30.0  # for one token, the queue of a busy server included
_CACHE = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_STARTED = re.compile(r"^process_start_time_seconds (\S+)", re.MULTILINE)
_CHECKED_TOKENS = 4
_DIGITS = 10
_EVENTS_PORT = 5557  # of rank 0, if `--kv-events-config` has no other
_CONNECT_S = 0.5
_REFUSED = (401, 403)
_OF_A_CLIENT = (400, 408, 413, 422)
_LORA = "/v1/load_lora_adapter"


class ModelCard(msgspec.Struct, frozen=True):
    """Model that a vLLM serves; ``root`` is what it has loaded, ``parent`` that of an adapter."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]


async def read_cards(origin: HttpOrigin) -> list[ModelCard]:
    """Return the models that a vLLM serves, without adapters; at least one.

    Raises:
        UnavailableError: It does not respond.
        UnfitServerError: It is no vLLM, or serves no model.
    """
    try:
        raw = await origin.fetch("GET", "/v1/models", _ANSWER_S)
    except StatusError as error:
        if error.answered in _REFUSED:
            raise needs_key(origin) from None
        raise
    try:
        models = msgspec.json.decode(raw, type=_Models)
    except msgspec.DecodeError as error:
        raise UnfitServerError(f"{origin.name} is no vLLM server: {error}") from None
    cards = [card for card in models.data if card.parent is None]
    if not cards:
        raise UnfitServerError(f"{origin.name} serves no model")
    return cards


async def read_facts(origin: HttpOrigin, names: Sequence[str]) -> ServerFacts:
    """Return the present properties of a vLLM that serves a model with one of these names.

    Paths and organisations before a name do not count.

    Raises:
        UnavailableError: It does not respond.
        UnfitServerError: It does not report what Baton needs.
    """
    try:
        version = msgspec.json.decode(await origin.fetch("GET", "/version", _ANSWER_S))["version"]
    except (msgspec.DecodeError, KeyError, TypeError, StatusError) as error:
        if isinstance(error, StatusError) and error.answered != 404:
            raise
        raise UnfitServerError(
            f"{origin.name} is no vLLM server (llama.cpp: `engine: llama-server`): {error}"
        ) from None
    served = _served(origin, await read_cards(origin), names)
    page = await read_metrics(origin)
    caches = [dict(_LABEL.findall(labels)) for labels in _CACHE.findall(page)]
    if not caches:
        raise UnfitServerError(
            f"{origin.name} has no vllm:cache_config_info at /metrics: remove --disable-log-stats "
            "from its `vllm serve`"
        )
    started = _STARTED.search(page)
    return ServerFacts(
        engine=f"vllm/{version}",
        model=served.id,
        root=served.root or served.id,
        max_context_tokens=served.max_model_len or 0,
        block_tokens=_number(origin, caches[0], "block_size"),
        blocks=sum(_number(origin, cache, "num_gpu_blocks") for cache in caches)
        * (caches[0].get("enable_prefix_caching") != "False"),
        ranks=len(caches),
        started=started[1] if started is not None else "",
    )


def _served(origin: HttpOrigin, cards: Sequence[ModelCard], names: Sequence[str]) -> ModelCard:
    wanted = set(map(last_part, names))
    fitting = [
        card for card in cards if wanted & {last_part(card.id), last_part(card.root or card.id)}
    ]
    if fitting:  # in any order, one and the same
        return min(fitting, key=lambda card: card.id)
    shown = ", ".join(card.id for card in cards)
    raise UnfitServerError(
        f"{origin.name} serves {shown}, and this fleet serves {names[0]}: remove the server, or "
        f"start its `vllm serve` with `--served-model-name {names[0]}`"
    )


def last_part(name: str) -> str:
    """Return the name of a model without the path or organisation before it."""
    return name.rstrip("/").rpartition("/")[2]


def _number(origin: HttpOrigin, labels: dict[str, str], name: str) -> int:
    value = labels.get(name, "")
    if not value.isdecimal() or len(value) > _DIGITS:
        raise UnfitServerError(
            f"{origin.name} reports {name}={value!r} at /metrics: Baton needs vLLM 0.32 or later"
        )
    return int(value)


async def _serves(origin: HttpOrigin, target: str) -> bool:
    """Return whether a server has a path for POST; it refuses a GET of such a path."""
    status, _, _ = await origin.ask("GET", target, _ANSWER_S)
    if status in _REFUSED:
        raise needs_key(origin)
    return status != 404


async def _check_token(
    origin: HttpOrigin, facts: ServerFacts, salt: str, tokens: int, *, hands_over: bool = False
) -> None:
    """Let the server compute a token behind some others, and check what it reports."""
    body = {
        "token_ids": [number % _CHECKED_TOKENS for number in range(tokens)],
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
        "cache_salt": salt,
        "model": facts.model,
        **({"kv_transfer_params": {"do_remote_decode": True}} if hands_over else {}),
    }
    raw = await origin.fetch("POST", protocol.GENERATE, _CHECK_S, msgspec.json.encode(body))
    chunk = protocol.read_chunk(raw)
    protocol.first_token(chunk, None)
    if hands_over and not (chunk.kv_transfer_params or {}).get("remote_block_ids"):
        raise UnfitServerError(
            f"{origin.name} hands over no KV: add `--kv-transfer-config "
            """'{"kv_connector":"NixlConnector","kv_role":"kv_both"}'` to its `vllm serve`, """
            "or remove `hand_off`"
        )
    if chunk.cached_tokens is None:
        raise UnfitServerError(
            f"{origin.name} reports no cached tokens: add `--enable-prompt-tokens-details` to its "
            "`vllm serve`"
        )


async def _default_events(host: str, facts: ServerFacts) -> tuple[tuple[str, str], ...]:
    """Return the endpoints of KV events at vLLM's default ports, if all ranks have theirs."""
    shown = f"[{host}]" if ":" in host else host
    ports = range(_EVENTS_PORT, _EVENTS_PORT + facts.ranks)
    if not all(await asyncio.gather(*(_listens(host, port) for port in ports))):
        return ()
    return tuple((f"tcp://{shown}:{port}", "") for port in ports)


async def _listens(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, found = await asyncio.open_connection(host, port)
    except OSError:
        return False
    found.close()
    return True


def numerics_of(facts: ServerFacts, hand_off: str) -> VllmFacts:
    """Return the properties with which workers describe an attached vLLM."""
    blocks = facts.blocks or -(-facts.max_context_tokens // facts.block_tokens)
    return VllmFacts(
        version=facts.engine.partition("/")[2],
        block_tokens=facts.block_tokens,
        blocks=blocks,
        max_context_tokens=facts.max_context_tokens,
        dtype="bf16",
        kv_dtype="bf16",
        attention="attached",
        width=1,
        step_tokens=0,
        hand_off=hand_off_id(hand_off, facts.block_tokens, 1),
    )


class AttachedVllm(AttachedEngine, VllmEngine):
    """Live requests of one attached vLLM."""

    is_attached = True

    def __init__(
        self,
        send: Callable[..., None],
        origin: HttpOrigin,
        facts: ServerFacts,
        model: "VllmServers",
        endpoints: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._name = msgspec.json.encode(facts.model)
        own = numerics_of(facts, model.hand_off)
        prefixes = _prefixes(facts, own, endpoints, send)
        self._ranks = prefixes if isinstance(prefixes, RankedPrefixes) else None
        hand_off = NixlHandOff(facts.block_tokens)
        parts = VllmParts(origin, VllmControl(origin), prefixes, hand_off)
        super().__init__(send, parts, own, model.artifact.config, model.max_adapters)
        load = partial(read_load, origin, one_step=facts.ranks == 1)
        self._look_after(facts, partial(read_facts, origin, model.names), load)

    def _named(self, body: bytes, spec: RequestSpec | None = None) -> bytes:
        """Return a body that a server of another model refuses."""
        if spec is not None and spec.adapter is not None:
            return body  # which has its name
        return b'{"model":' + self._name + b"," + body[1:]

    def _origin_of(self, request: LiveRequest) -> HttpOrigin:
        """Return the server, and the rank that a request is for, if it has several."""
        if self._ranks is None:
            return self._origin
        return at_rank(self._origin, self._ranks.choose(request))

    def _recovers(self, request: LiveRequest, why: str) -> bool:
        """Let another server hand the KV over, or compute the prompt, if a load has failed."""
        if not request.loading:
            return False
        self._load_failed(request, why)
        return True

    def _error(self, body: bytes, status: int) -> BatonError:
        """Return the error of the request, or of the server: a client has no part in its paths."""
        error = super()._error(body, status)
        of_client = status in _OF_A_CLIENT and "data_parallel_rank" not in error.message
        if isinstance(error, InvalidRequestError) and not of_client:
            return UnavailableError(error.message)
        return error


@dataclass(frozen=True, slots=True)
class VllmServers:
    """vLLM servers of a model; see `ServerKind`.

    Attributes:
        names: Names of the model, the first one for messages.
        artifact: The model, without its weights.
        max_adapters: LoRA adapters that a server loads at most; 0: none.
        hand_off: Way of KV between the servers, ``nixl``; empty: none.
    """

    names: Sequence[str]
    artifact: ModelArtifact
    max_adapters: int = 0
    hand_off: str = ""
    keeps_connections: ClassVar[bool] = True

    async def examine(self, origin: HttpOrigin) -> ServerFacts:
        """Return the properties of a vLLM that has all that Baton needs, and computes a token."""
        await origin.fetch("GET", "/health", _ANSWER_S)
        facts = await read_facts(origin, self.names)
        if facts.block_tokens % BLOCK_TOKENS:
            raise UnfitServerError(
                f"{origin.name} has blocks of {facts.block_tokens} tokens: add `--block-size` with "
                f"a multiple of {BLOCK_TOKENS} to its `vllm serve`"
            )
        if not await _serves(origin, protocol.GENERATE):
            raise UnfitServerError(
                f"{origin.name} ({facts.engine}) serves no {protocol.GENERATE}: add "
                "`--enable-scale-out` to its `vllm serve`, which vLLM has since 0.32"
            )
        if self.max_adapters > 0 and not await _serves(origin, _LORA):
            raise UnfitServerError(
                f"{origin.name} loads no LoRA adapters: start its `vllm serve` with "
                "`--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or set "
                "`adapters: {max_loaded: 0}`"
            )
        salt = os.urandom(16).hex()
        last = at_rank(origin, facts.ranks - 1) if facts.ranks > 1 else origin
        await _check_token(last, facts, salt, _CHECKED_TOKENS, hands_over=bool(self.hand_off))
        return facts

    async def past_step(self, origin: HttpOrigin) -> StepDone | None:
        """Return a step at the speed of the prompts that a vLLM has computed; None: unknown."""
        return past_step(await read_metrics(origin))

    async def events(
        self, origin: HttpOrigin, facts: ServerFacts, named: Endpoints | None
    ) -> Endpoints:
        """Return the endpoints at which its KV events arrive; None: those of vLLM's default.

        An endpoint may be silent, or another server's: then prefixes are better approximate.
        """
        found = await _default_events(origin.host, facts) if named is None else named
        if not found or not facts.blocks:
            return ()
        try:
            from baton.engine.vllm.events_client import arrive
        except ImportError as error:
            if named is None:
                return ()
            raise UnfitServerError(f"{origin.name}: events: {error}") from None
        if len(found) != facts.ranks:
            _LOG.warning(
                "%s has %d data-parallel ranks, and %d endpoints of KV events: none is used",
                origin.name,
                facts.ranks,
                len(found),
            )
            return ()
        tokens = 2 * facts.block_tokens + 1

        async def check(stream: str, server: HttpOrigin) -> str:
            with contextlib.suppress(BatonError):  # such as a queue, or a shorter context
                if await arrive(stream, lambda salt: _check_token(server, facts, salt, tokens)):
                    return ""
            return stream

        silent = await asyncio.gather(
            *(
                check(stream, at_rank(origin, rank) if facts.ranks > 1 else origin)
                for rank, (stream, _) in enumerate(found)
            )
        )
        if any(silent):
            lost = ", ".join(filter(None, silent))
            _LOG.warning("no KV events of %s arrive from %s", origin.name, lost)
            return ()
        return found

    def describe(self, facts: ServerFacts) -> EngineDescription:
        """Return the properties with which its worker is registered."""
        own = numerics_of(facts, self.hand_off)
        return EngineDescription(own.numerics_id, own.geometry(self.artifact), own.hand_off)

    def engine(
        self,
        send: Callable[..., None],
        origin: HttpOrigin,
        facts: ServerFacts,
        endpoints: Endpoints,
    ) -> AttachedEngine:
        """Return the engine of a server."""
        return AttachedVllm(send, origin, facts, self, endpoints)


def _prefixes(
    facts: ServerFacts,
    own: VllmFacts,
    endpoints: Sequence[tuple[str, str]],
    send: Callable[..., None],
) -> CachedPrefixes:
    """Return what the server has cached: by its KV events, or by the own requests."""
    size = facts.block_tokens
    blocks = own.pool_blocks // facts.ranks if facts.blocks else 0

    def of_rank(rank: int, on_change: OnChange) -> CachedPrefixes:
        if not endpoints:
            return ApproximatePrefixes(blocks, size, on_change)
        from baton.engine.vllm.events_client import EventPrefixes, KvEventsClient

        return EventPrefixes(KvEventsClient(*endpoints[rank]), size, on_change)

    return RankedPrefixes(facts.ranks, of_rank, send) if facts.ranks > 1 else of_rank(0, send)
