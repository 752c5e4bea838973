"""Event-loop time that both hand-off machines take for one long prompt, without any byte of KV.

    python -m benchmarks.handoff_machines [--tokens 32768 131072]

Shapes of an 8B model (32 layers, 8 KV heads of 128, bf16), chunks of 512 tokens, groups of
layers of about 1 MiB: what a worker's shell spends on bookkeeping while KV streams through it.
"""

import argparse
import sys
import time
from collections import deque

from baton.types.events import Published
from baton.types.geometry import BLOCK_TOKENS, KvGeometry
from kvtransfer.kv_slice import KvSlice
from kvtransfer.receiver import Action, HandoffReceiver, Pull
from kvtransfer.sender import Announce, HandoffSender

GEOMETRY = KvGeometry(num_layers=32, num_kv_heads=8, head_dim=128, num_blocks=1, dtype="bf16")
CHUNK_TOKENS = 512


class HandOff:
    """One prompt through both machines.

    Args:
        tokens: Of the prompt.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.sender_ns = self.receiver_ns = self.frames = 0
        self._sender = HandoffSender(GEOMETRY, tokens, 0, 1 << 62, 0)
        self._receiver = HandoffReceiver(GEOMETRY, tokens)
        self._asked: deque[tuple[KvSlice, int]] = deque()

    def run(self) -> None:
        """Publish, read and store everything."""
        blocks = CHUNK_TOKENS // BLOCK_TOKENS
        self._receiver.reserved(1, 0, 0)
        self._receiver.accepted(resumed=False, now_ns=0)
        for chunk in range(self.tokens // CHUNK_TOKENS):
            for layer in range(GEOMETRY.num_layers):
                event = Published(
                    request_id="r",
                    layer_begin=layer,
                    layer_count=1,
                    block_begin=chunk * blocks,
                    block_count=blocks,
                    valid_tokens=CHUNK_TOKENS,
                )
                self._publish(event)
                if not chunk and not layer:
                    self._receiver.bound(1, tuple(range(self.tokens // BLOCK_TOKENS)))
                while self._asked:
                    self._move(*self._asked.popleft())

    def _publish(self, event: Published) -> None:
        began_ns = time.perf_counter_ns()
        said = self._sender.published(event)
        heard_ns = time.perf_counter_ns()
        for action in said:
            if isinstance(action, Announce):
                self._note(self._receiver.published(action.kv_slice, 0))
        self.sender_ns += heard_ns - began_ns
        self.receiver_ns += time.perf_counter_ns() - heard_ns

    def _move(self, piece: KvSlice, epoch: int) -> None:
        began_ns = time.perf_counter_ns()
        if not self._sender.may_read(piece):
            raise RuntimeError(f"{piece} was published and may not be read")
        read_ns = time.perf_counter_ns()
        self._receiver.frame_arrived(piece, epoch)
        self._note(self._receiver.frame_stored(piece, epoch, 0))
        self.sender_ns += read_ns - began_ns
        self.receiver_ns += time.perf_counter_ns() - read_ns
        self.frames += 1

    def _note(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Pull):
                self._asked.extend((kv_slice, action.epoch) for kv_slice in action.kv_slices)


def main() -> None:
    """Print one line per length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[32_768, 131_072])
    for tokens in parser.parse_args().tokens:
        handoff = HandOff(tokens)
        handoff.run()
        sys.stdout.write(
            f"{tokens:8,} tokens, {handoff.frames:6,} frames: sender "
            f"{handoff.sender_ns / 1e9:8.3f} s, receiver {handoff.receiver_ns / 1e9:8.3f} s\n"
        )


if __name__ == "__main__":
    main()
