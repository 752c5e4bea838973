"""A server that speaks vLLM's HTTP and KV events, without a model: for scale, and for faults.

    python -m benchmarks.emulated_vllm PORT [--events] [--blocks N] [--words FILE]

Each token is a function of the tokens before it, so that a response continues
equally wherever it is resumed. Prompts are computed one at a time; responses stream beside them.
With words, each of which is one token, it serves text, too, and has no other tokens. With a
tokenizer it encodes texts as vLLM does; else it looks words up.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import os
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

from baton.telemetry.tasks import BackgroundTasks

VERSION = "0.32.0"
GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
STRANGER = "stranger"
"""Cache salt of prompts that are not counted."""
OF_CLIENTS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
"""Paths whose bodies clients send past Baton. A prompt of text has a token for each byte."""


@dataclass(kw_only=True)
class Emulation:
    """Properties of the server, and its fault.

    Attributes:
        missing: Arguments of ``vllm serve`` that the server was started without, or ``/version``.
        fault: ``""``, ``hang`` (no answers at all), ``stall`` (no tokens, but healthy), ``500``,
            ``flood`` (500, and a body without an end), ``garbage``,
            ``cut`` (the connection breaks after two tokens), ``foreign`` (tokens that
            the model does not have), ``endless`` (no finish), ``hold`` (the next request gets no
            answer, as if a proxy before the server held it).
        ranks: Data-parallel ranks, each with ``blocks`` and the next port of events.
        words: Token of each word with the space before it; empty: it serves no text.
        tokenizer: Encodes texts, in a thread, as vLLM does; None: words are looked up.
        answer_s: Time in which it answers what is not a request for tokens.
    """

    model: str = "smol"
    root: str = "/models/smol"
    key: str = ""
    max_model_len: int = 8192
    vocab_size: int = 49152
    block_tokens: int = 32
    blocks: int = 1024
    ranks: int = 1
    prefill_tokens_per_s: float = 20_000.0
    token_s: float = 0.005
    events_port: int = 0
    missing: frozenset[str] = frozenset()
    fault: str = ""
    words: Mapping[str, int] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    started: float = field(default_factory=time.time)
    answer_s: float = 0.0


class EmulatedCache:
    """Blocks by name, the least recently used first; a change is published."""

    def __init__(self, emulation: Emulation, publish: Any) -> None:
        self._emulation = emulation
        self._publish = publish
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def names(self, salt: str, tokens: Sequence[int]) -> list[bytes]:
        """Return the names of the whole blocks of a sequence."""
        packed = array("I", tokens).tobytes()
        size = 4 * self._emulation.block_tokens
        names: list[bytes] = []
        parent = salt.encode()
        for at in range(0, len(packed) - size + 1, size):
            parent = hashlib.blake2b(parent + packed[at : at + size], digest_size=16).digest()
            names.append(parent)
        return names

    @property
    def held_blocks(self) -> int:
        """Number of blocks that are held."""
        return len(self._held)

    def cached(self, names: Sequence[bytes]) -> int:
        """Return how many first blocks are held."""
        return sum(1 for _ in itertools.takewhile(self._held.__contains__, names))

    def clear(self) -> None:
        """Forget all blocks, without an event."""
        self._held.clear()

    def store(self, salt: str, tokens: Sequence[int]) -> None:
        """Hold the whole blocks of a sequence, and forget the least recently used ones."""
        size = self._emulation.block_tokens
        events: list[dict[str, Any]] = []
        names = self.names(salt, tokens)
        for at, name in enumerate(names):
            if name not in self._held:
                parent = names[at - 1] if at else None
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": [name],
                        "parent_block_hash": parent,
                        "token_ids": list(tokens[at * size : (at + 1) * size]),
                        "block_size": size,
                        "lora_id": None,
                        "medium": "GPU",
                        "lora_name": None,
                        "extra_keys": [[salt] if salt and not at else None],
                    }
                )
        for name in reversed(names):
            self._held[name] = None
            self._held.move_to_end(name)
        removed = []
        while len(self._held) > self._emulation.blocks:
            removed.append(self._held.popitem(last=False)[0])
        if removed:
            events.append({"type": "BlockRemoved", "block_hashes": removed})
        if events:
            self._publish(events)


class _Rank:
    """Cache and events of one data-parallel rank."""

    def __init__(self, emulation: Emulation, number: int) -> None:
        self.number = number
        self.cache = EmulatedCache(emulation, self._publish)
        self.publisher: zmq.asyncio.Socket | None = None
        self.requests = 0
        self.prefill = asyncio.Lock()
        self._numbers = itertools.count()

    def _publish(self, events: list[dict[str, Any]]) -> None:
        if self.publisher is None:
            return
        payload = msgspec.msgpack.encode([time.time(), events])
        number = next(self._numbers).to_bytes(8, "big")
        self.publisher.send_multipart([b"", number, payload])


class EmulatedVllm:
    """The server's application.

    Attributes:
        bodies: Requests for tokens that have arrived.
        running: Responses that have not ended.
        waiting: Prompts of which none is computed yet.
        sent: Chunks of all responses so far.
        prompts: Tokens of all prompts that were computed, without those of strangers.
        cached: Tokens of these that were cached.
        prefills: Prompts of all, with ``computed`` tokens that were not cached, in ``prefill_s``.
    """

    def __init__(self, emulation: Emulation) -> None:
        self.emulation = emulation
        self.bodies: list[dict[str, Any]] = []
        self.running = self.waiting = 0
        self.sent = 0
        self.prompts = self.cached = 0
        self.prefills = self.computed = 0
        self.prefill_s = 0.0
        self.ranks = [_Rank(emulation, rank) for rank in range(emulation.ranks)]
        self._tokens = list(emulation.words.values())
        self._zmq: zmq.asyncio.Context | None = None
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
        ]
        if "/version" not in emulation.missing:
            routes.append(Route("/version", self._version))
        if "--enable-scale-out" not in emulation.missing:
            routes.append(Route(GENERATE, self._generate, methods=["POST"]))
        if emulation.words:
            self._spelling = {token: f" {word}" for word, token in emulation.words.items()}
            routes.append(Route(COMPLETIONS, self._complete, methods=["POST"]))
            routes.append(Route(CHAT, self._complete, methods=["POST"]))
            routes.append(Route(f"{COMPLETIONS}/render", self._render, methods=["POST"]))
            routes.append(Route(f"{CHAT}/render", self._render, methods=["POST"]))
        else:
            routes += [Route(path, self._respond, methods=["POST"]) for path in OF_CLIENTS]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        if self.emulation.events_port:
            self._zmq = zmq.asyncio.Context()
            for number, rank in enumerate(self.ranks):
                rank.publisher = self._zmq.socket(zmq.PUB)
                rank.publisher.bind(f"tcp://127.0.0.1:{self.emulation.events_port + number}")
        yield
        self.close()

    def close(self) -> None:
        """Publish no more events."""
        if self._zmq is not None:
            self._zmq.destroy(linger=0)
        for rank in self.ranks:
            rank.publisher = None

    async def _health(self, _: Request) -> Response:
        await asyncio.sleep(self.emulation.answer_s)
        await self._hang()
        return Response(status_code=503 if self.emulation.fault == "dead" else 200)

    async def _hang(self) -> None:
        while self.emulation.fault == "hang":  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def _version(self, _: Request) -> Response:
        await asyncio.sleep(self.emulation.answer_s)
        await self._hang()
        return JSONResponse({"version": VERSION})

    async def _models(self, request: Request) -> Response:
        await asyncio.sleep(self.emulation.answer_s)
        await self._hang()
        if refused := self._refused(request):
            return refused
        one = self.emulation
        card = {"id": one.model, "root": one.root, "max_model_len": one.max_model_len}
        return JSONResponse({"object": "list", "data": [{**card, "parent": None}]})

    def _refused(self, request: Request) -> Response | None:
        key = self.emulation.key
        if key and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    async def _metrics(self, _: Request) -> Response:
        await asyncio.sleep(self.emulation.answer_s)
        await self._hang()
        one = self.emulation
        lines = [f"process_start_time_seconds {one.started}"]
        for rank in range(one.ranks):
            labels = {
                "block_size": one.block_tokens,
                "num_gpu_blocks": one.blocks,
                "enable_prefix_caching": "--no-enable-prefix-caching" not in one.missing,
                "engine": rank,
            }
            shown = ",".join(f'{name}="{value}"' for name, value in labels.items())
            lines.append(f"vllm:cache_config_info{{{shown}}} 1.0")
        of = f'{{model_name="{one.model}",engine="0"}}'
        held = max(rank.cache.held_blocks for rank in self.ranks) / one.blocks
        lines += [
            f"vllm:num_requests_running{of} {max(self.running - self.waiting, 0)}",
            f"vllm:generation_tokens_total{of} {self.sent}",
            f"vllm:num_requests_waiting{of} {self.waiting}",
            f"vllm:kv_cache_usage_perc{of} {held}",
            f"vllm:prefix_cache_queries_total{of} {self.prompts}",
            f"vllm:prefix_cache_hits_total{of} {self.cached}",
            f"vllm:request_prefill_time_seconds_sum{of} {self.prefill_s}",
            f"vllm:request_prefill_kv_computed_tokens_sum{of} {self.computed}",
            f"vllm:request_prefill_kv_computed_tokens_count{of} {self.prefills}",
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _complete(self, request: Request) -> Response:
        """Serve text: a completion, or the texts of a chat without a template."""
        body = msgspec.json.decode(await request.body())
        asked = await self._asked(body)
        is_chat = request.url.path == CHAT
        if body.get("stream"):
            stream = self._stream(asked, lambda chunk: self._spelt(chunk, is_chat, stream=True))
            return StreamingResponse(stream, media_type="text/event-stream")
        chunks = [chunk async for chunk in self._chunks(asked)]
        tokens = [
            token for chunk in chunks for one in chunk["choices"] for token in one["token_ids"]
        ]
        choice = {"index": 0, "token_ids": tokens, "finish_reason": "length"}
        whole = {"choices": [choice], "usage": chunks[-1]["usage"]}
        return JSONResponse(self._spelt(whole, is_chat, stream=False))

    async def _render(self, request: Request) -> Response:
        """Return the tokens of a text, without computing them."""
        asked = await self._asked(msgspec.json.decode(await request.body()))
        rendered = {"request_id": "rendered", "model": self.emulation.model, **asked}
        return JSONResponse(rendered if request.url.path.startswith(CHAT) else [rendered])

    async def _asked(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request for text as one for tokens."""
        text = body.get("prompt") or " ".join(one["content"] for one in body["messages"])
        one = self.emulation
        if one.tokenizer is None:
            tokens = [one.words[word] for word in text.split()]
        else:
            tokens = (await asyncio.to_thread(one.tokenizer.encode, text)).ids
        return {
            "token_ids": tokens,
            "sampling_params": {"max_tokens": body.get("max_tokens", 16)},
            "cache_salt": body.get("cache_salt"),
        }

    def _spelt(self, chunk: dict[str, Any], is_chat: bool, *, stream: bool) -> dict[str, Any]:
        """Return a chunk of tokens as one of text."""
        choices = []
        for one in chunk["choices"]:
            text = "".join(self._spelling[token] for token in one["token_ids"])
            content: dict[str, Any] = {"text": text}
            if is_chat:
                content = {"delta" if stream else "message": {"role": "assistant", "content": text}}
            choices.append({"index": 0, "finish_reason": one["finish_reason"], **content})
        kind = "chat.completion" if is_chat else "text_completion"
        head = {"id": "emulated", "object": kind, "created": 0, "model": self.emulation.model}
        return {**head, **chunk, "choices": choices}

    async def _generate(self, request: Request) -> Response:
        await self._hang()
        if refused := self._refused(request):
            return refused
        body = msgspec.json.decode(await request.body())
        one = self.emulation
        if body.get("model", one.model) != one.model:
            message = f"The model `{body['model']}` does not exist."
            return JSONResponse({"error": {"message": message, "code": 404}}, 404)
        if len(body["token_ids"]) >= one.max_model_len:
            message = f"the prompt exceeds the maximum model length of {one.max_model_len}"
            return JSONResponse({"error": {"message": message, "code": 400}}, 400)
        if one.fault == "500":
            return JSONResponse({"error": {"message": "a bug", "code": 500}}, 500)
        if one.fault == "flood":
            return StreamingResponse(_flood(), 500)
        if one.fault == "hold":
            one.fault = ""
            await asyncio.Event().wait()
        named = request.headers.get("x-data-parallel-rank")
        if named is not None and int(named) >= one.ranks:
            message = f"data_parallel_rank {named} is out of range [0, {one.ranks})."
            return JSONResponse({"error": {"message": message, "code": 400}}, 400)
        body["rank"] = None if named is None else int(named)
        self.bodies.append(body)
        if body.get("stream"):
            return StreamingResponse(self._stream(body), media_type="text/event-stream")
        chunks = [chunk async for chunk in self._chunks(body)]
        ids = [token for chunk in chunks for one in chunk["choices"] for token in one["token_ids"]]
        whole = {"index": 0, "token_ids": ids, "finish_reason": "length"}
        return JSONResponse({"choices": [whole], "usage": chunks[-1]["usage"]})

    async def _respond(self, request: Request) -> Response:
        """Respond to a client past Baton, in the form of completions, with usage."""
        await self._hang()
        body = msgspec.json.decode(await request.body())
        prompt = body.get("prompt")
        ids = prompt if isinstance(prompt, list) else list(msgspec.json.encode(prompt or body))
        asked = {"max_tokens": body.get("max_tokens", 16)}
        inner = {"token_ids": ids, "sampling_params": asked, "cache_salt": body.get("cache_salt")}
        self.bodies.append(body)
        if body.get("stream"):
            return StreamingResponse(self._stream(inner), media_type="text/event-stream")
        chunks = [chunk async for chunk in self._chunks(inner)]
        return JSONResponse({"choices": [], "usage": chunks[-1]["usage"]})

    async def _stream(
        self, body: dict[str, Any], spelt: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    ) -> AsyncIterator[bytes]:
        self.running += 1
        try:
            count = 0
            async for chunk in self._chunks(body):
                fault = self.emulation.fault
                while self.emulation.fault in ("hang", "stall"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                if fault == "garbage":
                    yield b"data: <html>502 Bad Gateway</html>\n\n"
                    return
                if fault == "cut" and count >= 2:
                    raise ConnectionError("cut on purpose")
                count += 1
                self.sent += 1
                sent = spelt(chunk) if spelt is not None else chunk
                yield b"data: " + msgspec.json.encode(sent) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1

    @contextlib.asynccontextmanager
    async def _turn(self, rank: _Rank) -> AsyncIterator[None]:
        """Wait until the rank computes no other prompt."""
        self.waiting += 1
        try:
            await rank.prefill.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            rank.prefill.release()

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Compute a request at the rank that it names, or at the one with the fewest requests."""
        number = body.get("rank")
        least = min(self.ranks, key=lambda rank: rank.requests)
        rank = least if number is None else self.ranks[number]
        rank.requests += 1
        try:
            async for chunk in self._chunks_at(rank, body):
                yield chunk
        finally:
            rank.requests -= 1

    async def _chunks_at(self, rank: _Rank, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        one = self.emulation
        tokens: list[int] = list(body["token_ids"])
        salt = body.get("cache_salt") or ""
        names = rank.cache.names(salt, tokens[:-1])
        async with self._turn(rank):
            cached = rank.cache.cached(names) * one.block_tokens
            if salt != STRANGER:
                self.prompts += len(tokens)
                self.cached += cached
            prefill_s = (len(tokens) - cached) / one.prefill_tokens_per_s
            self.prefills += 1
            self.computed += len(tokens) - cached
            self.prefill_s += prefill_s
            await asyncio.sleep(prefill_s)
            rank.cache.store(salt, tokens)
        sampling = body["sampling_params"]
        most = sampling["max_tokens"]
        stops = set(sampling.get("stop_token_ids", ()))
        for count in itertools.count(1):
            token = next_token(tokens, one.vocab_size)
            if one.words:
                token = self._tokens[token % len(self._tokens)]
            if one.fault == "foreign":
                token = one.vocab_size + 7
            tokens.append(token)
            ends = count >= most and one.fault != "endless"
            reason = "stop" if token in stops else "length" if ends else None
            choice: dict[str, Any] = {"index": 0, "token_ids": [token], "finish_reason": reason}
            if sampling.get("logprobs") is not None:
                top = [{"token_id": token, "logprob": -0.5, "rank": 1}]
                scored = {"token_id": token, "logprob": -0.5, "top_logprobs": top}
                choice["logprobs"] = {"content": [scored]}
            yield {"choices": [choice]}
            if reason is not None:
                break
            await asyncio.sleep(one.token_s)
        rank.cache.store(salt, tokens[:-1])
        details = {"cached_tokens": cached}
        usage: dict[str, Any] = {
            "prompt_tokens": len(body["token_ids"]),
            "completion_tokens": count,
        }
        if "--enable-prompt-tokens-details" not in one.missing:
            usage["prompt_tokens_details"] = details
        yield {"choices": [], "usage": usage}


async def _flood() -> AsyncIterator[bytes]:
    while True:
        yield b"an error without an end " * 1000
        await asyncio.sleep(0.001)  # so that the end of the connection is noticed


def next_token(tokens: Sequence[int], vocab_size: int) -> int:
    """Return the token behind others, which depends on the last 64 of them and their number."""
    packed = msgspec.msgpack.encode([len(tokens), tokens[-64:]])
    digest = hashlib.blake2b(packed, digest_size=4).digest()
    return 1000 + int.from_bytes(digest, "little") % (vocab_size - 1000)


class EmulatedServer:
    """A listening server, in the event loop of its caller."""

    def __init__(self, emulation: Emulation, port: int = 0) -> None:
        self.vllm = EmulatedVllm(emulation)
        config = uvicorn.Config(
            self.vllm.app,
            host="127.0.0.1",
            port=port,
            log_level="critical",
            access_log=False,
            timeout_graceful_shutdown=0,
        )
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._tasks = BackgroundTasks("emulated vLLM")
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen, and return the URL."""
        self._task = self._tasks.spawn(self._server.serve(), "server")
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        """Close the port and all connections."""
        self._server.force_exit = True
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self.vllm.close()  # uvicorn does not end the application when it is forced


async def main() -> None:
    """Run ``python -m benchmarks.emulated_vllm``, with a server at each port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--events", action="store_true", help="publish events at PORT + 1000")
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--block-tokens", type=int, default=32)
    parser.add_argument("--prefill-tokens-per-s", type=float, default=20_000.0)
    parser.add_argument("--token-s", type=float, default=0.005)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--model", default="smol")
    parser.add_argument("--words", type=Path, help="file of JSON: the token of each word")
    parser.add_argument("--tokenizer", help="its file: texts are encoded as vLLM does")
    options = parser.parse_args()
    for port in options.ports:
        emulation = Emulation(
            blocks=options.blocks,
            block_tokens=options.block_tokens,
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            token_s=options.token_s,
            max_model_len=options.max_model_len,
            model=options.model,
            events_port=port + 1000 if options.events else 0,
            words=msgspec.json.decode(options.words.read_bytes()) if options.words else {},
            tokenizer=Tokenizer.from_file(options.tokenizer) if options.tokenizer else None,
        )
        print(await EmulatedServer(emulation, port).start(), os.getpid(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
