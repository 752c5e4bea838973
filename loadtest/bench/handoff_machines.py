"""Event-loop time that both hand-off machines take for one long prompt, without any byte of KV.

    python -m loadtest.bench.handoff_machines [--tokens 32768 131072]

Shapes of an 8B model (32 layers, 8 KV heads of 128, bf16), chunks of 512 tokens, groups of layers of
about 1 MiB: what a worker's shell spends on bookkeeping while KV streams through it.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable

from engine.core.events import Published
from engine.core.geometry import BLOCK_TOKENS, KvGeometry
from kvtransfer.kv_slice import KvSlice
from kvtransfer.receiver import Action, HandoffReceiver, Pull
from kvtransfer.sender import Announce, HandoffSender

GEOMETRY = KvGeometry(num_layers=32, num_kv_heads=8, head_dim=128, num_blocks=1, dtype="bf16")
CHUNK_TOKENS = 512


def run(tokens: int) -> tuple[float, float, int]:
    """(seconds of the sender, seconds of the receiver, frames) for a prompt of ``tokens``."""
    sender = HandoffSender(GEOMETRY, tokens, 0, 1 << 62, 0)
    receiver = HandoffReceiver(GEOMETRY, tokens)
    spent_ns = {"sender": 0, "receiver": 0}
    frames = 0

    def timed(side: str, work: Callable[[], list[Action]]) -> list[Action]:
        began_ns = time.perf_counter_ns()
        actions = work()
        spent_ns[side] += time.perf_counter_ns() - began_ns
        return actions

    receiver.reserved(1, 0, 0)
    receiver.accepted(resumed=False, now_ns=0)
    receiver.bound(1, tuple(range(tokens // BLOCK_TOKENS)))
    todo: deque[tuple[KvSlice, int]] = deque()
    blocks = CHUNK_TOKENS // BLOCK_TOKENS
    for chunk in range(tokens // CHUNK_TOKENS):
        for layer in range(GEOMETRY.num_layers):
            began_ns = time.perf_counter_ns()
            said = sender.published(Published("r", layer, 1, chunk * blocks, blocks, CHUNK_TOKENS))
            spent_ns["sender"] += time.perf_counter_ns() - began_ns
            for action in said:
                if isinstance(action, Announce):
                    kv_slice = action.kv_slice
                    _queue(todo, timed("receiver", lambda s=kv_slice: receiver.published(s, 0)))
            while todo:
                piece, epoch = todo.popleft()
                began_ns = time.perf_counter_ns()
                if not sender.may_read(piece):
                    raise RuntimeError(f"{piece} was published and may not be read")
                spent_ns["sender"] += time.perf_counter_ns() - began_ns
                frames += 1
                receiver.frame_arrived(piece, epoch)
                _queue(
                    todo,
                    timed("receiver", lambda p=piece, e=epoch: receiver.frame_stored(p, e, 0)),
                )
    return spent_ns["sender"] / 1e9, spent_ns["receiver"] / 1e9, frames


def _queue(todo: deque[tuple[KvSlice, int]], actions: list[Action]) -> None:
    for action in actions:
        if isinstance(action, Pull):
            todo.extend((kv_slice, action.epoch) for kv_slice in action.kv_slices)


def main() -> None:
    """Print one line per length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[32_768, 131_072])
    for tokens in parser.parse_args().tokens:
        sender_s, receiver_s, frames = run(tokens)
        sys.stdout.write(
            f"{tokens:8,} tokens, {frames:6,} frames: sender {sender_s:8.3f} s, "
            f"receiver {receiver_s:8.3f} s\n"
        )


if __name__ == "__main__":
    main()
