"""Time of a decode step by kernel, and the gaps that a captured graph leaves between kernels."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from baton.engine.cuda.decode_graphs import DecodeRow
from baton.engine.cuda.decoder import CudaDecoder
from benchmarks.gpu.decode_loop import DecodeLoop
from benchmarks.gpu.model import BLOCK, Machine, decode_step_s, random_decoder, scattered_tables

CASES = ((1, 1024), (32, 4096), (128, 1024))  # sequences, context
STEPS = 8
SHOWN = 14


@dataclass(frozen=True)
class KernelTime:
    """Mean time and number of launches of one kernel in a step."""

    name: str
    us: float
    launches: float


def profile_steps(machine: Machine, report: Any) -> None:
    """Measure the steps of ``CASES``, as a graph and launched one by one."""
    cases = ((2, 60),) if machine.smoke else CASES
    blocks = max(batch * -(-context // BLOCK) for batch, context in cases)
    decoder = random_decoder(machine, blocks, exact=False)
    for batch, context in cases:
        case = f"batch {batch}, context {context}"
        kernels: list[KernelTime] = []
        report.run("profile", case, partial(_measure, machine, decoder, batch, context, kernels))
        for kernel in kernels[:SHOWN]:
            text = f"{kernel.us:8.1f} us in {kernel.launches:4.0f} launches: {kernel.name[:70]}"
            report.add(
                "profile", case, text, kernel=kernel.name, us=kernel.us, launches=kernel.launches
            )


def _measure(
    machine: Machine, decoder: CudaDecoder, batch: int, context: int, kernels: list[KernelTime]
) -> dict[str, Any]:
    """Return the figures of a step; its kernels are added to ``kernels``, the slowest first."""
    widest = -(-context // BLOCK)
    single = DecodeLoop(decoder, max_blocks=widest, graphs=False)
    single_us = 1e6 * decode_step_s(machine, decoder, single, batch, context)
    loop = DecodeLoop(decoder, max_blocks=widest)
    step_us = 1e6 * decode_step_s(machine, decoder, loop, batch, context)
    kernels += _kernels(machine, decoder, loop, batch, context)
    inside_us = sum(kernel.us for kernel in kernels)
    launches = sum(kernel.launches for kernel in kernels)
    return {
        "step_us": step_us,
        "step_us_without_graph": single_us,
        "kernels": launches,
        "inside_us": inside_us,
        "gap_us": (step_us - inside_us) / launches,
    }


def _kernels(
    machine: Machine, decoder: CudaDecoder, loop: DecodeLoop, batch: int, context: int
) -> list[KernelTime]:
    on_gpu = machine.device.type == "cuda"
    tables = scattered_tables(decoder, batch, context)
    # ends before ``context``, so in a bucket of splits that is captured already
    loop.start([DecodeRow(7, context - STEPS - 2, table) for table in tables])
    loop.launch()
    loop.read()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        for _ in range(STEPS):
            loop.launch()
        while loop.pending:
            loop.read()
    found = []
    for row in profiled.key_averages():
        total_us = row.self_device_time_total if on_gpu else row.self_cpu_time_total
        if total_us > 0:
            found.append(KernelTime(row.key, total_us / STEPS, row.count / STEPS))
    return sorted(found, key=lambda kernel: -kernel.us)
