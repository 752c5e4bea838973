"""What saving KV to the tiers costs running streams: no tier, memory, memory and disk.

    python -m benchmarks.kv.tier_writes [--rounds 3] [--streams 4] [--seconds 15] [--disk DIR]

A worker with the real engine (SmolLM2, one thread) writes answers; beside them a prompt of 384
tokens comes every second, and none is asked for twice. So the pool is full, and each prompt's
blocks have to be saved ahead of eviction, where there is a tier. Three such workers take turns, in
an order that turns.

ITL      gaps between tokens of the streams: p50 is a step without a prompt, p99 one with it
beside   what threads of the engine's process take of a core that do not run steps; copies are
         made by one of them
saved    what went to each tier, and blocks that were evicted before
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kv.workers import BLOCK_TOKENS, Stream, bench_worker, cpu_s, p99, prompts

PROMPT_TOKENS = 384
POOL_BLOCKS = 640
MEMORY_MB, DISK_MB = 96, 2048
_WARM_TOKENS = 10
_PAUSE_S = 1.0  # between prompts
_NO_TIER = "no tier"


@dataclass(slots=True)
class Seen:
    """Of one worker, all rounds."""

    gaps_s: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    saved: dict[str, float] = field(default_factory=dict)  # bytes/s by tier, of the last round
    lost_blocks: float = 0.0

    def line(self, base: "Seen") -> str:
        """Milliseconds, beside those without a tier."""
        itl, than = (statistics.median(one.gaps_s) for one in (self, base))
        saved = ", ".join(f"{rate / 1e6:.1f} MB/s to {tier}" for tier, rate in self.saved.items())
        late = p99(self.gaps_s)
        return (
            f"ITL p50 {itl * 1e3:6.1f} ms ({itl / than - 1:+.1%})   p99 {late * 1e3:6.1f} "
            f"ms ({late / p99(base.gaps_s) - 1:+.1%})   beside "
            f"{statistics.median(self.beside):.2%} of a core   saved {saved or 'nothing'}, lost "
            f"{self.lost_blocks:.0f} blocks   ({len(self.gaps_s)} gaps)"
        )


async def fill(stream: Stream, seed: int, seconds: float) -> None:
    """A prompt a second that nobody has asked for before."""
    until_s = time.monotonic() + seconds
    for number, prompt in enumerate(prompts(seed, int(seconds / _PAUSE_S) + 1, PROMPT_TOKENS)):
        name = f"fill-{seed}-{number}"
        due_s = time.monotonic() + _PAUSE_S
        await stream.submit(name, prompt, 1)
        await stream.ended(name)
        if due_s > until_s:
            break
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


def _beside_s(pid: int) -> float:
    """CPU time of all threads of a process but its first, which runs the steps."""
    threads = [one for one in Path(f"/proc/{pid}/task").iterdir() if one.name != str(pid)]
    return sum(cpu_s(str(one)) for one in threads)


async def one_turn(stream: Stream, turn: int, options: argparse.Namespace, seen: Seen) -> None:
    """Streams beside prompts, at one worker."""
    names = [f"stream-{turn}-{number}" for number in range(options.streams)]
    for number, name in enumerate(names):
        await stream.submit(name, [number + 5, 8, 9], 100 * BLOCK_TOKENS)
    answers = [stream.answers[name] for name in names]
    await stream.until(lambda: all(len(one.tokens_s) >= _WARM_TOKENS for one in answers))
    await fill(stream, 2 * turn, POOL_BLOCKS * BLOCK_TOKENS / PROMPT_TOKENS * _PAUSE_S / 2)
    moved = await stream.worker.counters("baton_kv_tier_moved_bytes_total")
    pid = stream.worker.record.pid
    begin, beside_s = time.monotonic(), _beside_s(pid)
    await fill(stream, 2 * turn + 1, options.seconds)
    end = time.monotonic()
    seen.beside.append((_beside_s(pid) - beside_s) / (end - begin))
    for one in answers:
        seen.gaps_s += one.gaps_s(begin, end)
    for series, moved_bytes in (await stream.worker.counters("baton_kv_tier_moved")).items():
        if 'direction="saved"' in series:
            tier = series.split('tier="')[1].split('"')[0]
            rate = (moved_bytes - moved.get(series, 0.0)) / (end - begin)
            seen.saved[tier] = rate
    failures = await stream.worker.counters("baton_kv_tier_failures_total")
    seen.lost_blocks = sum(n for series, n in failures.items() if 'reason="lost"' in series)
    await stream.cancel(*names)


async def measure(options: argparse.Namespace, folder: str) -> dict[str, Seen]:
    """All rounds."""
    tiers: dict[str, dict[str, Any]] = {
        _NO_TIER: {},
        "memory": {"memory_mb": MEMORY_MB},
        "memory and disk": {
            "memory_mb": MEMORY_MB,
            "disk_mb": DISK_MB,
            "disk_folder": folder,
        },
    }
    found = {name: Seen() for name in tiers}
    async with contextlib.AsyncExitStack() as stack:
        streams: dict[str, Stream] = {}
        for name, tier in tiers.items():
            engine = {"kv_blocks": POOL_BLOCKS, "kv_tiers": tier}
            pin = ("taskset", "-c", options.cores)
            worker = await stack.enter_async_context(
                bench_worker(f"decode-{len(streams)}", engine, *pin)
            )
            streams[name] = await stack.enter_async_context(Stream.opened(worker))
        for turn in range(options.rounds):
            for name in list(tiers) if turn % 2 == 0 else list(tiers)[::-1]:
                await one_turn(streams[name], turn, options, found[name])
                sys.stdout.write(f"  round {turn}: {name}: {found[name].line(found[name])}\n")
                sys.stdout.flush()
    return found


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--cores", default="0", help="of the workers")
    parser.add_argument("--disk", default=None, help="folder of the disk tier; a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        found = asyncio.run(measure(options, folder))
    sys.stdout.write(f"{options.streams} streams beside a prompt of {PROMPT_TOKENS} a second\n")
    for name, seen in found.items():
        sys.stdout.write(f"  {name:16} {seen.line(found[_NO_TIER])}\n")


if __name__ == "__main__":
    main()
