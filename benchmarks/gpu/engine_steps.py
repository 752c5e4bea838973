"""Decode steps of the whole engine, scheduler included, beside the decode loop of this benchmark.

    PYTHONPATH=.:proto python3 -m benchmarks.gpu.engine_steps [--smoke] [--out F.json]

Weights are random. The engine plans a step, computes it, and reads its tokens before it plans the
next one, so its steps contain the host's time; the decode loop runs ahead of the host.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.model import Machine

CASES = ((1, 1024), (32, 1024), (128, 256))  # rows, prompt tokens
STEPS = 64


def measure(machine: "Machine", rows: int, prompt_tokens: int, steps: int) -> dict[str, Any]:
    """Return medians of a step in milliseconds: the engine's, its parts, and the loop's."""
    import torch

    from baton.engine.core.core import EngineCore
    from baton.engine.core.scheduler import SchedulerConfig
    from baton.engine.cuda.lora import CudaAdapters
    from baton.engine.cuda.runner import CudaRunner
    from baton.types.geometry import KvGeometry
    from benchmarks.gpu.decode_loop import DecodeLoop
    from benchmarks.gpu.model import BLOCK, decode_step_s, random_decoder

    s = machine.shape
    blocks = rows * (-(-(prompt_tokens + steps) // BLOCK) + 2)
    decoder = random_decoder(machine, blocks, exact=False)
    context = prompt_tokens + steps // 2
    loop = DecodeLoop(decoder, max_blocks=-(-context // BLOCK))
    loop_s = decode_step_s(machine, decoder, loop, rows, context)
    geometry = KvGeometry(
        num_layers=s.num_layers,
        num_kv_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        num_blocks=blocks,
        dtype={2: "bf16", 4: "fp32"}[machine.dtype.itemsize],
        block_tokens=BLOCK,
    )
    host = torch.zeros(geometry.pool_bytes, dtype=torch.uint8)
    adapters = CudaAdapters(_config(s), decoder, 8)
    runner = CudaRunner(decoder, memoryview(host.numpy().data), geometry, (), adapters)
    core = EngineCore(runner, SchedulerConfig(rows, 8192))
    for row in range(rows):
        core.scheduler.submit(_request(row, prompt_tokens, steps, s.vocab_size), 0)
    parts: list[tuple[float, float, float]] = []
    while core.batch.has_work():
        began_s = time.perf_counter()
        plan = core.plan(time.monotonic_ns())
        planned_s = time.perf_counter()
        results = runner.execute(plan)
        computed_s = time.perf_counter()
        core.apply(plan, results, time.monotonic_ns(), 1)
        ended_s = time.perf_counter()
        if len(plan.rows) == rows and all(row.decodes for row in plan.rows):
            parts.append((planned_s - began_s, computed_s - planned_s, ended_s - computed_s))
    parts = parts[len(parts) // 4 :]  # without captures of graphs
    names = ("plan_ms", "execute_ms", "apply_ms")
    shares = {
        name: 1e3 * statistics.median(values)
        for name, values in zip(names, zip(*parts, strict=True), strict=True)
    }
    step_ms = 1e3 * statistics.median(sum(part) for part in parts)
    return {"step_ms": step_ms, **shares, "loop_ms": 1e3 * loop_s, "ratio": 1e3 * loop_s / step_ms}


def _request(number: int, prompt_tokens: int, new: int, vocabulary: int) -> Any:
    from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
    from baton.types.params import SamplingParams

    spec = RequestSpec(
        kind=Kind.FULL,
        params=SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True),
        hash_seed=b"bench",
        ticket=number,
        cacheable=False,
    )
    prompt = [(number * 31 + i * 7) % vocabulary for i in range(prompt_tokens)]
    return EngineRequest(request_id=str(number), prompt=prompt, spec=spec)


def _config(shape: Any) -> Any:
    """Return what the adapters read of a model."""
    from types import SimpleNamespace

    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
    values = {name: getattr(shape, name) for name in names}
    return SimpleNamespace(**values, intermediate_size=shape.intermediate_size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--smoke", action="store_true", help="toy shapes in the interpreter")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args(arguments)
    if options.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    from benchmarks.gpu.model import LLAMA_3_8B, TOY, Machine

    torch.set_grad_enabled(False)
    machine = (
        Machine(torch.device("cpu"), torch.float32, TOY, smoke=True)
        if options.smoke
        else Machine(torch.device("cuda"), torch.bfloat16, LLAMA_3_8B, smoke=False)
    )
    found = {}
    for rows, prompt_tokens in ((2, 20),) if options.smoke else CASES:
        figures = measure(machine, rows, prompt_tokens, 8 if options.smoke else STEPS)
        machine.free_bytes()
        found[f"{rows} x {prompt_tokens}"] = figures
        shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"{rows:4} rows of {prompt_tokens}: {shown}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
