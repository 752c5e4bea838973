"""How much of a hand-off's transfer hides behind prefill's compute, by each transport.

    python -m benchmarks.kv.overlap [--tokens 1024] [--rounds 3] [--tokens-per-s 1000 4000]
                                        [--svg FILE]

The hand-off is that of ``benchmarks.handoff``: two processes, shapes of an 8B model, the puller
and the machine of a decode worker. Prefill's compute is a clock: a group of layers is published
whenever a prefill of that rate would have it. Nothing computes, so this is the hand-off's own
share; what compute and transfer take from each other on one machine is not in it.

transfer   the prompt's KV at once, nothing to hide behind
exposed    from the last group's being computed to the last byte's being verified and placed
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from batonpb.decode_pb2 import Submission

from baton.types.geometry import BLOCK_TOKENS
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from baton.wire.message_memory import keep_message_memory
from benchmarks.handoff import (
    CHUNK_TOKENS,
    TOKEN,
    OnePeer,
    geometry,
    memory_file,
    parts_of_puller,
    rectangles,
    sender_process,
    stands,
)
from benchmarks.kv.timeline import Group, draw
from decode_worker.frame_puller import FramePuller
from decode_worker.parts import WorkerParts
from kvtransfer.chunk import PoolView
from kvtransfer.kv_slice import KvSlice
from kvtransfer.receiver import Action, HandoffReceiver, Pull
from kvtransfer.transport import Peer, Transport
from kvtransfer.transports import connect_all

TRANSFER_GOAL = 0.10


@dataclass(slots=True)
class Timeline:
    """Seconds since prefill began, by group of layers."""

    groups: dict[tuple[int, int], Group] = field(default_factory=dict)

    def group(self, kv_slice: KvSlice) -> Group:
        """Of the chunk and the layer that a slice belongs to."""
        chunk = kv_slice.block_begin * BLOCK_TOKENS // CHUNK_TOKENS
        return self.groups.setdefault((chunk, kv_slice.layer_begin), Group())

    @property
    def exposed_s(self) -> float:
        """From the last group's being computed to the last one's being there."""
        groups = self.groups.values()
        return max(g.stored_s for g in groups) - max(g.computed_s for g in groups)


class _RecordingReceiver(HandoffReceiver):
    """Notes when the last frame of each group was placed."""

    timeline: Timeline
    began_s: float

    def frame_stored(self, kv_slice: KvSlice, epoch: int, now_ns: int) -> list[Action]:
        self.timeline.group(kv_slice).stored_s = time.perf_counter() - self.began_s
        return super().frame_stored(kv_slice, epoch, now_ns)


async def hand_off(
    transport: Transport, way: str, peer: Peer, pool: PoolView, tokens: int, tokens_per_s: float
) -> Timeline:
    """One prompt, published as it would be computed at this rate (0: all at once)."""
    machine = _RecordingReceiver(pool.geometry, tokens, frame_bytes=transport.frame_bytes)
    timeline = machine.timeline = Timeline()
    parts = parts_of_puller(OnePeer(transport, way, peer), pool)
    wanted = rectangles(pool.geometry, tokens)
    group_s = tokens / tokens_per_s / len(wanted) if tokens_per_s else 0.0
    async with asyncio.TaskGroup() as pulls:

        def perform(actions: list[Action]) -> None:
            for action in actions:
                if isinstance(action, Pull):
                    for kv_slice in action.kv_slices:
                        group = timeline.group(kv_slice)
                        group.asked_s = group.asked_s or time.perf_counter() - machine.began_s
                    pulls.create_task(puller.pull(action, peer.target, 1))

        submission = Submission(request_id="r", attempt=1)
        puller = FramePuller(submission, machine, cast(WorkerParts, parts), perform)
        machine.reserved(1, 0, 0)
        machine.accepted(resumed=False, now_ns=0)
        perform(machine.bound(1, tuple(range(tokens // BLOCK_TOKENS))))
        machine.began_s = time.perf_counter()
        for number, kv_slice in enumerate(wanted, start=1):
            due_s = number * group_s - (time.perf_counter() - machine.began_s)
            if due_s > 0:
                await asyncio.sleep(due_s)
            timeline.group(kv_slice).computed_s = time.perf_counter() - machine.began_s
            perform(machine.published(kv_slice, 0))
    if machine.repairs or any(not group.stored_s for group in timeline.groups.values()):
        raise RuntimeError("not all of it came")
    return timeline


async def measure(tokens: int, rounds: int, rates: list[float]) -> dict[str, list[Group]]:
    """Print a line for each transport and rate; groups of a round at the last rate, to be drawn."""
    pool = PoolView(memory_file(geometry(tokens).pool_bytes)[1], geometry(tokens))
    channels = Channels()
    transports = connect_all(channels, FleetToken(TOKEN))
    drawn: dict[str, list[Group]] = {}
    async with sender_process("--tokens", str(tokens)) as peer:
        for name, transport in transports.items():
            if not await stands(transport, peer, rectangles(pool.geometry, tokens)[0]):
                sys.stdout.write(f"  {name}: not run, it did not come to stand\n")
                continue
            work = _work(transport, name, peer, pool, tokens)
            await work(0.0)
            bulk_s = statistics.median([(await work(0.0)).exposed_s for _ in range(rounds)])
            for rate in rates:
                seen = [await work(rate) for _ in range(rounds)]
                exposed_s = statistics.median([timeline.exposed_s for timeline in seen])
                sys.stdout.write(
                    f"  {name:14} transfer {bulk_s * 1e3:6.1f} ms, prefill at {rate:6.0f} tok/s "
                    f"({tokens / rate:.2f} s): exposed {exposed_s * 1e3:6.1f} ms, "
                    f"{exposed_s / bulk_s:.2f} of it (goal {TRANSFER_GOAL:.2f})\n"
                )
                sys.stdout.flush()
                if rate == rates[-1]:
                    drawn[name] = list(seen[-1].groups.values())
    for transport in transports.values():
        await transport.close()
    await channels.close()
    return drawn


def _work(
    transport: Transport, name: str, peer: Peer, pool: PoolView, tokens: int
) -> Callable[[float], Coroutine[Any, Any, Timeline]]:
    async def work(tokens_per_s: float) -> Timeline:
        return await hand_off(transport, name, peer, pool, tokens, tokens_per_s)

    return work


def main() -> None:
    """Print what is exposed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-per-s", type=float, nargs="+", default=[1000.0, 4000.0])
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    keep_message_memory()  # as workers do
    sys.stdout.write(f"hand-off of {options.tokens} tokens of an 8B model while it is computed\n")
    drawn = asyncio.run(measure(options.tokens, options.rounds, options.tokens_per_s))
    if options.svg is not None:
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        options.svg.write_text(draw(drawn, options.tokens), encoding="utf-8")


if __name__ == "__main__":
    main()
