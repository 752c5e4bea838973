"""What running streams lose while a burst of KV arrives at their worker, paced and not paced.

    python -m benchmarks.kv.burst [--rounds 3] [--streams 4] [--prompts 8] [--tokens 1024]
                                      [--transport grpc] [--shares 0 0.025]
                                      [--decode-cores 0 --other-cores 1]

A worker with the real engine (SmolLM2, one thread) writes answers. Then several prompts come at
once whose KV another worker holds: as prefix hits, or as hand-offs. In a round each of several such
workers, which differ in `receive_cpu_share` (0: not paced), does both, in an order that turns.

ITL      gaps between tokens of the streams: in the seconds before and after a burst, and from the
         burst's being asked to the last of its KV. What a burst lost is its p50 (or mean) over
         that before it and that after it, halfway between, since steps grow with the streams;
         told is the median burst, and the range
MB/s     KV that came in, by the time of the burst
CPU      where the machine has other work, these say more: what the worker's shell takes of a core,
         and CPU time of the engine for a step of the streams
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import time
from dataclasses import dataclass, field

from benchmarks.kv.workers import (
    BLOCK_TOKENS,
    BenchWorker,
    Mark,
    Stream,
    bench_worker,
    hold,
    p99,
    prompts,
)

KINDS = ("prefix hits", "hand-offs")
_QUIET_S = 2.5
_STREAM_TOKENS = 1_500
_WARM_TOKENS = 10


@dataclass(slots=True)
class Seen:
    """Of one kind of burst at one worker, all rounds."""

    quiet_s: list[float] = field(default_factory=list)
    burst_s: list[float] = field(default_factory=list)
    lost_p50: list[float] = field(default_factory=list)  # of each burst
    lost_mean: list[float] = field(default_factory=list)
    shell: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # of a core
    step_cpu_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    bytes_per_s: list[float] = field(default_factory=list)
    lasted_s: list[float] = field(default_factory=list)

    def line(self) -> str:
        """Milliseconds, and what was lost of the median."""
        lost, mean = statistics.median(self.lost_p50), statistics.median(self.lost_mean)
        mb_per_s, lasted_s = (statistics.median(x) for x in (self.bytes_per_s, self.lasted_s))
        shell, step = (
            tuple(statistics.fmean(one) for one in pair) for pair in (self.shell, self.step_cpu_s)
        )
        return (
            f"ITL p50 {statistics.median(self.burst_s) * 1e3:6.1f} ms, lost {lost:.1%} "
            f"({min(self.lost_p50):.1%} to {max(self.lost_p50):.1%}), mean {mean:.1%}   p99 "
            f"{p99(self.quiet_s) * 1e3:6.1f} → {p99(self.burst_s) * 1e3:6.1f} ms   "
            f"{mb_per_s / 1e6:6.1f} MB/s for {lasted_s:.2f} s   ({len(self.burst_s)} gaps)   CPU: "
            f"shell {shell[0]:.1%} → {shell[1]:.1%}, "
            f"step {step[0] * 1e3:.1f} → {step[1] * 1e3:.1f} ms"
        )


async def pulled_bytes(worker: BenchWorker) -> float:
    """Since it started."""
    return sum((await worker.counters("baton_pulled_bytes_total")).values())


async def burst(
    stream: Stream,
    holder: BenchWorker,
    kind: str,
    wanted: list[list[int]],
    seen: Seen,
    streams: int,
) -> None:
    """One, between two quiet times, beside answers that are being written."""
    mark = f"{kind}-{time.monotonic_ns()}"
    running = [f"{mark}-stream-{number}" for number in range(streams)]
    for number, name in enumerate(running):
        await stream.submit(name, [number + 5, 8, 9], _STREAM_TOKENS)
    answers = [stream.answers[name] for name in running]
    await stream.until(lambda: all(len(one.tokens_s) >= _WARM_TOKENS for one in answers))
    marks = [Mark.now(stream.worker, answers)]
    await asyncio.sleep(_QUIET_S)
    before_bytes = await pulled_bytes(stream.worker)
    marks.append(Mark.now(stream.worker, answers))
    names = [f"{mark}-{number}" for number in range(len(wanted))]
    for name, prompt in zip(names, wanted, strict=True):
        if kind == "hand-offs":
            await stream.submit(name, prompt, 2, prefill=holder)
        else:
            blocks = (len(prompt) - 1) // BLOCK_TOKENS
            await stream.submit(name, prompt, 1, prefix=(holder, blocks))
    await stream.ended(*names)
    marks.append(Mark.now(stream.worker, answers))
    came_bytes = await pulled_bytes(stream.worker) - before_bytes
    await asyncio.sleep(_QUIET_S)
    marks.append(Mark.now(stream.worker, answers))
    if any(one.ended_s for one in answers):
        raise RuntimeError("a stream ended before the burst did: raise _STREAM_TOKENS")
    gaps_s: list[list[float]] = []
    for number, (begin, end) in enumerate(itertools.pairwise(marks)):
        is_burst = number == 1
        gaps_s.append([gap for one in answers for gap in one.gaps_s(begin.at_s, end.at_s)])
        seen.shell[is_burst].append((end.shell_s - begin.shell_s) / (end.at_s - begin.at_s))
        steps = (end.tokens - begin.tokens) / streams
        seen.step_cpu_s[is_burst].append((end.engine_s - begin.engine_s) / steps)
    before_s, burst_s, after_s = gaps_s
    seen.quiet_s += before_s + after_s
    seen.burst_s += burst_s
    for lost, of in ((seen.lost_p50, statistics.median), (seen.lost_mean, statistics.fmean)):
        lost.append(2 * of(burst_s) / (of(before_s) + of(after_s)) - 1)
    lasted_s = marks[2].at_s - marks[1].at_s
    seen.lasted_s.append(lasted_s)
    seen.bytes_per_s.append(came_bytes / lasted_s)
    await stream.cancel(*running)


async def measure(options: argparse.Namespace) -> dict[tuple[str, str], Seen]:
    """All rounds."""
    shares = {f"{share:.1%} of a core" if share else "not paced": share for share in options.shares}
    found = {(kind, name): Seen() for kind in KINDS for name in shares}
    per_burst = options.prompts * (options.tokens // BLOCK_TOKENS + 1)
    async with contextlib.AsyncExitStack() as stack:
        holder = await stack.enter_async_context(
            bench_worker(
                "prefill-0",
                {"kv_blocks": 2 * per_burst + 64},
                *("taskset", "-c", options.other_cores),
                transports=[options.transport],
            )
        )
        streams: dict[str, Stream] = {}
        for name, share in shares.items():
            worker = await stack.enter_async_context(
                bench_worker(
                    f"decode-{len(streams)}",
                    {"kv_blocks": per_burst + options.streams * 128},
                    *("taskset", "-c", options.decode_cores),
                    receive_cpu_share=share,
                )
            )
            streams[name] = await stack.enter_async_context(Stream.opened(worker))
        for turn in range(options.rounds):
            for kind in KINDS:
                wanted = prompts(
                    len(KINDS) * turn + KINDS.index(kind), options.prompts, options.tokens
                )
                await hold(holder, wanted)
                order = list(shares) if turn % 2 == 0 else list(shares)[::-1]
                for name in order:
                    seen = found[kind, name]
                    await burst(streams[name], holder, kind, wanted, seen, options.streams)
                    sys.stdout.write(f"  round {turn}: {kind}, {name}: {seen.line()}\n")
                    sys.stdout.flush()
    return found


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--transport", default="grpc", choices=("grpc", "tcp", "shared_memory"))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.025])
    parser.add_argument("--decode-cores", default="0", help="of the workers that write")
    parser.add_argument("--other-cores", default="1", help="comma-separated: of the rest")
    options = parser.parse_args()
    os.sched_setaffinity(0, {int(core) for core in options.other_cores.split(",")})
    found = asyncio.run(measure(options))
    sys.stdout.write(
        f"{options.streams} streams, bursts of {options.prompts} prompts of {options.tokens} "
        f"tokens by {options.transport}; {options.rounds} rounds\n"
    )
    for (kind, name), seen in found.items():
        sys.stdout.write(f"  {kind:12} {name:14} {seen.line()}\n")


if __name__ == "__main__":
    main()
