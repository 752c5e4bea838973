"""Whole hand-offs over a real slow link, plain and as int8.

    python -m benchmarks.kv.slow_link [--mbit 50 200 500] [--rounds 5] [--tokens 1024]

Needs root: this process and the decode workers are in a network namespace of their own, and a
prefill worker in a second one, behind a cable that lets so many Mbit/s out of it (`tc … tbf`). All
are in `numerics: fast`, with SmolLM2. The prompts lie in the prefill worker's cache, so that a
hand-off is its transfer. Medians; the first hand-off of each worker, which finds out how fast the
link is, does not count.

transfer   from the first frame's being asked for to the commit
2nd token  from the request to its second token: the first one comes from prefill without any KV
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.kv.workers import (
    BLOCK_TOKENS,
    BenchWorker,
    Stream,
    bench_worker,
    hold,
    prompts,
)

NEAR, FAR = "10.78.0.1", "10.78.0.2"
_INSIDE = "BATON_BENCH_IN_NAMESPACE"
_BURST_S = 1 / 250  # of the link's rate, that tbf lets through at once
_LEAST_BURST_BYTES = 1 << 16


class Cable:
    """From this network namespace to another one.

    Args:
        far_pid: A process in the other.
    """

    def __init__(self, far_pid: int) -> None:
        self.there = ("nsenter", f"--target={far_pid}", "--net")
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "near", "type", "veth", "peer", "far", "netns", str(far_pid))
        for address, name, where in ((NEAR, "near", ()), (FAR, "far", self.there)):
            _run(*where, "ip", "address", "add", f"{address}/24", "dev", name)
            _run(*where, "ip", "link", "set", name, "up")
        _run(*self.there, "ip", "link", "set", "lo", "up")

    @classmethod
    @contextlib.contextmanager
    def plugged(cls) -> Iterator["Cable"]:
        """With a namespace at its other end, for as long as the block runs."""
        holder = subprocess.Popen(
            ["unshare", "--net", "bash", "-c", "echo up; exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        try:
            if holder.stdout is None or holder.stdout.readline() != b"up\n":
                raise RuntimeError("no network namespace")
            yield cls(holder.pid)
        finally:
            holder.kill()
            holder.communicate()

    def let_out(self, mbit: int) -> None:
        """So many Mbit/s come from there."""
        burst_bytes = max(round(mbit * 1e6 / 8 * _BURST_S), _LEAST_BURST_BYTES)
        tbf = ("tbf", "rate", f"{mbit}mbit", "burst", str(burst_bytes), "latency", "400ms")
        _run(*self.there, "tc", "qdisc", "replace", "dev", "far", "root", *tbf)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


@dataclass(slots=True)
class Seen:
    """Hand-offs of one worker."""

    transfer_s: list[float] = field(default_factory=list)
    second_s: list[float] = field(default_factory=list)
    int8_bytes: float = 0.0
    plain_bytes: float = 0.0

    def line(self) -> str:
        """Medians, and in what it came."""
        all_bytes = self.int8_bytes + self.plain_bytes
        return (
            f"transfer {statistics.median(self.transfer_s):6.3f} s ({min(self.transfer_s):.3f} to "
            f"{max(self.transfer_s):.3f})   2nd token {statistics.median(self.second_s):6.3f} s   "
            f"{all_bytes / 1e6 / len(self.transfer_s):5.1f} MB each, "
            f"{self.int8_bytes / all_bytes:4.0%} int8"
        )


async def hand_off(stream: Stream, holder: BenchWorker, name: str, prompt: list[int]) -> Seen:
    """One."""
    before = await _pulled(stream.worker)
    await stream.submit(name, prompt, 2, prefill=holder)
    (answer,) = await stream.ended(name)
    if answer.mode != "disaggregated" or answer.times is None:
        raise RuntimeError(f"{name} was no hand-off")
    int8, plain = (b - a for a, b in zip(before, await _pulled(stream.worker), strict=True))
    second_s = answer.tokens_s[1] - answer.asked_s
    return Seen([answer.times.transfer_ns / 1e9], [second_s], int8, plain)


async def _pulled(worker: BenchWorker) -> tuple[float, float]:
    counted = await worker.counters("baton_pulled_bytes_total")
    of = [sum(v for k, v in counted.items() if f'"{one}"' in k) for one in ("int8", "plain")]
    return of[0], of[1]


async def measure(options: argparse.Namespace, cable: Cable) -> None:
    """Print two lines for each rate."""
    wanted = prompts(0, options.rounds + 1, options.tokens)
    engine = {
        "numerics": "fast",
        "kv_blocks": (options.rounds + 2) * (options.tokens // BLOCK_TOKENS + 1),
    }
    there = {"host": FAR, "insecure": True, "transports": ["grpc"]}
    here = {"host": NEAR, "insecure": True}
    async with bench_worker("prefill-0", engine, *cable.there, **there) as holder:
        await hold(holder, wanted)
        for mbit in options.mbit:
            cable.let_out(mbit)
            async with contextlib.AsyncExitStack() as stack:
                streams: dict[str, Stream] = {}
                for name, int8 in (("plain", False), ("int8", True)):
                    worker = await stack.enter_async_context(
                        bench_worker(f"decode-{name}", engine, int8_chunks=int8, **here)
                    )
                    streams[name] = await stack.enter_async_context(Stream.opened(worker))
                found = {name: Seen() for name in streams}
                for number, prompt in enumerate(wanted):
                    for name, stream in streams.items():
                        seen = await hand_off(stream, holder, f"{name}-{number}", prompt)
                        if number:
                            found[name].transfer_s += seen.transfer_s
                            found[name].second_s += seen.second_s
                            found[name].int8_bytes += seen.int8_bytes
                            found[name].plain_bytes += seen.plain_bytes
            for name, seen in found.items():
                sys.stdout.write(f"  {mbit:5} Mbit/s  {name:5}  {seen.line()}\n")
            sys.stdout.flush()


def main() -> None:
    """Go into a namespace, and measure there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=int, nargs="+", default=[50, 200, 500])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    if not os.environ.get(_INSIDE):
        if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip", "tc"))):
            sys.exit("this needs root, unshare, nsenter, ip and tc")
        os.environ[_INSIDE] = "1"
        command = [sys.executable, "-m", "benchmarks.kv.slow_link", *sys.argv[1:]]
        os.execvp("unshare", ["unshare", "--net", *command])
    with Cable.plugged() as cable:
        asyncio.run(measure(options, cable))


if __name__ == "__main__":
    main()
