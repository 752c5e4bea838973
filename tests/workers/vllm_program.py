"""A program in vLLM's place: it repeats what a real vLLM sent.

    python -m tests.workers.vllm_program … --uds SOCKET …

A file ``fail`` in the folder of this worker's model lets loads of KV fail, ``hang`` delays them.

With ``hand_off: baton`` it fills the pages of a prompt, and notes in a file ``loaded`` whether the
pages that it has to load have the same bytes.
"""

import asyncio
import contextlib
import os
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

if TYPE_CHECKING:
    from tests.workers.vllm_pool import Pool

RECORDED = Path(__file__).parents[1] / "engine/vllm/recorded"
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
VOCABULARY = 49152
PREFILL = msgspec.json.decode((RECORDED / "prefill.json").read_bytes())


def prefill(prompt_tokens: int, held: bool) -> bytes:
    """Return the recorded first token of a prompt, and parameters of so many tokens if held."""
    own = {**PREFILL["kv_transfer_params"], "remote_num_tokens": prompt_tokens}
    own["remote_port"] = os.getpid()
    return msgspec.json.encode({**PREFILL, "kv_transfer_params": own if held else None})


class Scored:
    """Responses of a batch-invariant model: scores depend on the tokens before them only."""

    def __init__(self) -> None:
        self.caches = True
        self.bias = 0.0
        self.salts: set[str] = set()

    def response(self, request: dict[str, Any], *, lies: bool = False) -> bytes:
        """Return scores in the form of recorded ones; with ``lies`` two are wrong."""
        tokens, sampling = request["token_ids"], request["sampling_params"]
        full = msgspec.json.decode((RECORDED / "scores_alone.json").read_bytes())
        known = self.caches and request["cache_salt"] in self.salts
        self.salts.add(request["cache_salt"])
        full["usage"]["prompt_tokens_details"] = {"cached_tokens": 32 * known}
        every = list(tokens)
        content: list[dict[str, Any]] = []
        for _ in range(sampling["max_tokens"]):
            every.append(zlib.crc32(b"%r" % every) % VOCABULARY)
            content.append({"token_id": every[-1], "logprob": self._score(every)})
        rows: list[dict[int, dict[str, float]] | None] = [
            {every[at]: {"logprob": self._score(every[: at + 1])}} for at in range(len(tokens))
        ]
        rows[0] = None
        if lies:
            rows[17] = {every[17]: {"logprob": -0.5}}
            content[0]["logprob"] = -0.5
        choice = {**full["choices"][0], "token_ids": every[len(tokens) :]}
        choice["logprobs"] = {"content": content}
        prompt_rows = rows if "prompt_logprobs" in sampling else None
        return msgspec.json.encode({**full, "choices": [choice], "prompt_logprobs": prompt_rows})

    def _score(self, tokens: list[int]) -> float:
        return -zlib.crc32(b"%r" % tokens[-40:]) / 2**30 - self.bias


class Program:
    """The sockets of one vLLM."""

    def __init__(self, folder: Path, switches: Path, pool: "Pool | None") -> None:
        self.folder = folder
        self.switches = switches
        self.pool = pool
        self.scored = Scored()

    async def response(self, target: bytes, body: bytes) -> bytes:
        if target == b"/version":
            return msgspec.json.encode({"version": os.environ.get("RECORDED_VERSION", "0.32.0")})
        if target.startswith(b"/server_info"):
            info = msgspec.json.decode((RECORDED / "server_info.json").read_bytes())
            info["vllm_env"] = {
                "VLLM_BATCH_INVARIANT": os.environ.get("VLLM_BATCH_INVARIANT") == "1"
            }
            return msgspec.json.encode(info)
        if target != b"/inference/v1/generate":
            return b""
        request = msgspec.json.decode(body)
        with (self.switches / "requests").open("ab") as log:
            log.write(body + b"\n")
        parameters = request.get("kv_transfer_params") or {}
        if self.pool is not None and "save_pages" in parameters:
            self.pool.save(parameters["save_pages"], request["token_ids"])
            saved = {"saved_tokens": len(request["token_ids"])}
            return msgspec.json.encode({**PREFILL, "kv_transfer_params": saved})
        if self.pool is not None and "load_pages" in parameters:
            holds = self.pool.holds(parameters["load_pages"], request["token_ids"])
            with (self.switches / "loaded").open("a") as log:
                log.write(f"{holds}\n")
        if request["sampling_params"].get("logprobs") == 0:
            return self.scored.response(request)
        if not request.get("stream"):
            return prefill(len(request["token_ids"]), held="do_remote_decode" in parameters)
        if parameters:
            while (self.switches / "hang").exists():
                await asyncio.sleep(0.02)
            if (self.switches / "fail").exists():
                return (RECORDED / "load_failed.sse").read_bytes()
        return (RECORDED / "length.sse").read_bytes()

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
            body = await reader.readexactly(length)
            response = await self.response(head.split(b" ", 2)[1], body)
            writer.write(HEAD % len(response) + response)
            await writer.drain()

    async def serve(self) -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as publisher:
            publisher.bind(f"ipc://{self.folder}/events")
            await asyncio.start_unix_server(self.http, self.folder / "http")
            recorded = (RECORDED / "events.msgpack").read_bytes()
            while True:
                await publisher.recv()  # a subscription
                for parts in msgspec.msgpack.decode(recorded):
                    await publisher.send_multipart(parts)


if __name__ == "__main__":
    socket = Path(sys.argv[sys.argv.index("--uds") + 1])
    model = Path(sys.argv[sys.argv.index("serve") + 1])
    connector = msgspec.json.decode(sys.argv[sys.argv.index("--kv-transfer-config") + 1])
    extra = connector.get("kv_connector_extra_config")
    program = Program(socket.parent, model, None)
    if extra:
        from tests.workers.vllm_pool import Pool  # numpy takes half of a start

        program.pool = Pool(extra)
    asyncio.run(program.serve())
