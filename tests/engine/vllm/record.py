"""Records exchanges of a real vLLM, for the tests in this folder.

    .venv/bin/python -m tests.engine.vllm.record [whole | hand_off | exact]

It needs the environment and the model of `make test-vllm`, and writes `recorded/`: exchanges about
whole requests, about hand-offs, or of the self-test for `exact`.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.remote.http import HttpOrigin
from baton.engine.remote.live_request import Parameters
from baton.engine.settings import EngineSettings, ExternalEngine
from baton.engine.vllm import protocol, selftest, server
from baton.types.params import SamplingParams
from fleet.ports import chosen_port
from tests.vllm.places import ARGS, MODEL, PYTHON

HOST = "127.0.0.1"
RECORDED = Path(__file__).parent / "recorded"
FRANCE = [504, 3575, 282, 4649, 314]  # "The capital of France is"
LONG = list(range(1000, 1200))
PROBE = list(range(2000, 2040))
EOS = (2,)
SEEDS = (b"\x01" * 16, b"\x02" * 16)
PARAMS = {
    "logprobs": SamplingParams(max_tokens=4, temperature=0.0, logprobs=2),
    "stop_token": SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=(30,)),
    "grammar": SamplingParams(max_tokens=20, temperature=0.0, grammar='start: "Paris"'),
    "length": SamplingParams(max_tokens=3, temperature=0.0),
}
KEPT = {
    "cache_config": ("block_size", "num_gpu_blocks", "cache_dtype"),
    "model_config": ("max_model_len", "dtype"),
    "parallel_config": ("tensor_parallel_size", "pipeline_parallel_size"),
    "device_config": ("device",),
    "attention_config": ("backend",),
    "scheduler_config": ("max_num_batched_tokens",),
}


def spec(params: SamplingParams, seed: bytes = SEEDS[0]) -> RequestSpec:
    return RequestSpec(kind=Kind.FULL, params=params, hash_seed=seed)


async def generate(
    folder: str, prompt: list[int], of: RequestSpec, parameters: Parameters | None = None
) -> bytes:
    parts: list[bytes] = []
    body = protocol.generate_body("r", prompt, of, 0, EOS, parameters)
    origin = server.origin_in(folder)
    exchange = await origin.begin("POST", protocol.GENERATE, body, parts.append)
    await exchange.done
    return b"".join(parts)


def recorded_messages(name: str) -> list[list[bytes]]:
    """Return the messages of a ZeroMQ socket, each as its parts."""
    data = (RECORDED / f"{name}.msgpack").read_bytes()
    return msgspec.msgpack.decode(data, type=list[list[bytes]])


def write_messages(name: str, received: list[list[bytes]]) -> None:
    (RECORDED / f"{name}.msgpack").write_bytes(msgspec.msgpack.encode(received))


async def listen(path: str, kind: int, seconds: float) -> list[list[bytes]]:
    """Return what a ZeroMQ socket of vLLM sends, from the first batch on."""
    received: list[list[bytes]] = []
    with zmq.asyncio.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{path}")
        if kind == zmq.SUB:
            socket.subscribe(b"")
        else:
            await socket.send_multipart([b"", bytes(8)])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    received.append(await socket.recv_multipart())
    return received


async def record_info(origin: HttpOrigin) -> None:
    info = json.loads(await origin.fetch("GET", "/server_info?config_format=json", 60.0))
    config = info["vllm_config"]
    kept = {part: {name: config[part][name] for name in names} for part, names in KEPT.items()}
    mode = {"VLLM_BATCH_INVARIANT": info["vllm_env"]["VLLM_BATCH_INVARIANT"]}
    text = json.dumps({"vllm_config": kept, "vllm_env": mode}, indent=1)
    (RECORDED / "server_info.json").write_text(text + "\n")


async def record_exact(folder: str) -> None:
    """Record the scores of a prompt alone, in a batch, and behind its cached prefix."""
    origin = server.origin_in(folder)
    await record_info(origin)

    async def scores(prompt: list[int], salt: str, **more: int) -> bytes:
        body = selftest.score_body(prompt, salt, 4, **more)
        return await origin.fetch("POST", protocol.GENERATE, 60.0, body)

    alone = await scores(PROBE, "one", prompt_logprobs=0)
    cached = await scores(PROBE, "one")
    others = [scores(LONG, f"{number}", prompt_logprobs=0) for number in range(7)]
    await origin.fetch("POST", "/pause?mode=keep", 30.0)
    asked = asyncio.gather(scores(PROBE, "two", prompt_logprobs=0), *others)
    await asyncio.sleep(0.5)
    await origin.fetch("POST", "/resume", 30.0)
    batch, *_ = await asked
    for name, data in (("alone", alone), ("batch", batch), ("cached", cached)):
        (RECORDED / f"scores_{name}.json").write_bytes(data)


async def record(folder: str) -> None:
    origin = server.origin_in(folder)
    await record_info(origin)
    for name, params in PARAMS.items():
        (RECORDED / f"{name}.sse").write_bytes(await generate(folder, FRANCE, spec(params)))
    too_long = await generate(folder, [504] * 5000, spec(PARAMS["length"]))
    (RECORDED / "too_long.json").write_bytes(too_long)
    reading = asyncio.ensure_future(listen(f"{folder}/events", zmq.SUB, 12.0))
    await asyncio.sleep(2.0)
    for seed in SEEDS:  # two tenants, the same prompt
        cached = await generate(folder, LONG, spec(PARAMS["length"], seed))
    cached = await generate(folder, LONG, spec(PARAMS["length"], seed))
    (RECORDED / "cached.sse").write_bytes(cached)
    await origin.fetch("POST", "/reset_prefix_cache?reset_running_requests=true", 30.0)
    await generate(folder, LONG, spec(PARAMS["length"]))
    write_messages("events", await reading)
    write_messages("replay", await listen(f"{folder}/replay", zmq.DEALER, 3.0))


async def record_hand_off(folder: str) -> None:
    """Record a prompt for another vLLM, and two loads: from nowhere, and of nothing."""
    handing = msgspec.structs.replace(spec(PARAMS["logprobs"]), kind=Kind.PREFILL)
    body = protocol.prefill_body("r", LONG, handing, 0, EOS, {"do_remote_decode": True})
    parts: list[bytes] = []
    origin = server.origin_in(folder)
    await (await origin.begin("POST", protocol.GENERATE, body, parts.append)).done
    (RECORDED / "prefill.json").write_bytes(b"".join(parts))
    parameters = protocol.read_chunk(b"".join(parts)).kv_transfer_params or {}
    loading = spec(PARAMS["length"], SEEDS[1])
    nowhere = {**parameters, "remote_engine_id": "gone", "remote_port": chosen_port(HOST, "")}
    (RECORDED / "load_failed.sse").write_bytes(await generate(folder, LONG, loading, nowhere))


RECORDERS = {"whole": record, "hand_off": record_hand_off, "exact": record_exact}


async def main(what: str) -> None:
    RECORDED.mkdir(exist_ok=True)
    settings = EngineSettings(model=str(MODEL), max_context_tokens=4096)
    external = ExternalEngine(kind="vllm", python=str(PYTHON), args=ARGS)
    if what == "hand_off":
        address = f"{HOST}:{chosen_port(HOST, '')}"
        external = msgspec.structs.replace(external, hand_off="nixl", address=address)
    with tempfile.TemporaryDirectory() as folder:
        arguments = server.command(external, settings, MODEL, Path(folder))
        vllm = await server.start(arguments, 1, external)
        try:
            await server.until_healthy(vllm, f"{folder}/http", print)
            await RECORDERS[what](folder)
        finally:
            vllm.terminate()
            await vllm.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["whole"]))
    sys.stdout.write(f"wrote {RECORDED}\n")
