"""CPU time that a decode step on CUDA spends on the host's pool and on its inputs; needs no GPU.

    python -m benchmarks.gpu.host_steps [--out F.json]

It runs what the step loop runs between two steps, without launches and copies to the device: which
blocks go to the host's pool, and the packing of inputs and block tables.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import torch

from baton.engine.core.plan import PlanRow
from baton.engine.cuda.decode_graphs import DecodeRow, DecodeSteps
from baton.engine.cuda.decoder import CudaDecoder
from baton.engine.cuda.host_pool import HostPool
from benchmarks.gpu.model import BLOCK, TOY, Machine, random_decoder

CASES = tuple((rows, context) for rows in (32, 128) for context in (1024, 4096, 32768))
STEPS = 64
_BLOCKS = 512  # ids repeat: only their number counts


def measure(decoder: CudaDecoder, rows: int, context: int) -> dict[str, float]:
    """Return median times of a step in microseconds, and the blocks that a step finishes."""
    pool = HostPool(torch.zeros_like(decoder.pool), decoder.pool)
    width = -(-(context + STEPS) // BLOCK) + 1
    steps = DecodeSteps(decoder, width)
    tables = [[(row * 7 + block) % _BLOCKS for block in range(width)] for row in range(rows)]
    pool_s = []
    inputs_s = []
    finished = 0
    for step in range(STEPS):
        plan_rows = [
            _row(number, context + step + number % BLOCK, table)
            for number, table in enumerate(tables)
        ]
        decode_rows = [DecodeRow(1, row.start, row.block_ids) for row in plan_rows]
        began_s = time.perf_counter()
        finished += len(pool.touched(plan_rows, ends=False))
        pool_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        steps.start(decode_rows)
        inputs_s.append(time.perf_counter() - began_s)
    return {
        "pool_us": 1e6 * statistics.median(pool_s),
        "inputs_us": 1e6 * statistics.median(inputs_s),
        "finished_blocks": finished / STEPS,
    }


def _row(number: int, position: int, table: list[int]) -> PlanRow:
    blocks = table[: position // BLOCK + 1]
    return PlanRow(sequence_id=number, tokens=[1], start=position, block_ids=blocks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line for each number of rows and context."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    machine = Machine(torch.device("cpu"), torch.bfloat16, TOY, smoke=True)
    decoder = random_decoder(machine, _BLOCKS, exact=False)
    found = {}
    for rows, context in CASES:
        figures = measure(decoder, rows, context)
        found[f"{rows} x {context}"] = figures
        print(
            f"{rows:4} rows of {context:6}: pool {figures['pool_us']:6.0f} us, "
            f"inputs {figures['inputs_us']:6.0f} us, "
            f"{figures['finished_blocks']:.1f} blocks to the host",
            flush=True,
        )
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
