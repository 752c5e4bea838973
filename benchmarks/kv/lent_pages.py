"""CPU time that a reader of lent pages takes, beside a bare memcpy, in one thread of one process.

    python -m benchmarks.kv.lent_pages [--rounds 7] [--tokens 1024]

``benchmarks.handoff`` times whole hand-offs between processes and needs a quiet machine. This
one counts the thread's own CPU time, so that other work disturbs it by the memory only.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from batonpb import prefill_pb2 as pb

from benchmarks.handoff import (
    geometry,
    memory_file,
    page_table,
    rectangles,
    without_digests,
)
from kvtransfer import chunk, lent_pages
from kvtransfer.kv_slice import KvSlice, cut
from kvtransfer.shared_memory import FRAME_BYTES

CLAIM = ("r", 1, 1, b"i" * 16)


def frame(source: chunk.PoolView, pages: tuple[int, ...], kv_slice: KvSlice) -> pb.ChunkHeader:
    """A slice as a sender lends it."""
    request_id, attempt, generation, incarnation = CLAIM
    lent = pages[kv_slice.block_begin : kv_slice.block_begin + kv_slice.block_count]
    return pb.ChunkHeader(
        request_id=request_id,
        attempt=attempt,
        generation=generation,
        source_incarnation=incarnation,
        kv_slice=kv_slice.to_wire(),
        pages=lent,
        digests=lent_pages.page_digest(source, lent, kv_slice, chunk.binding(*CLAIM)),
    )


def main() -> None:
    """Print one line per way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    shape, table = geometry(options.tokens), page_table(options.tokens, scattered=False)
    source, target = (chunk.PoolView(memory_file(shape.pool_bytes)[1], shape) for _ in range(2))
    kv_slices = [
        piece
        for kv_slice in rectangles(shape, options.tokens)
        for piece in cut(kv_slice, shape, FRAME_BYTES)
    ]
    size_bytes = sum(kv_slice.payload_bytes(shape) for kv_slice in kv_slices)
    ours, theirs = (np.frombuffer(memory_file(size_bytes)[1], np.uint8) for _ in range(2))
    bound = chunk.binding(*CLAIM)

    def store() -> None:
        for kv_slice, header in zip(kv_slices, headers, strict=True):
            lent_pages.LentFrame(header, source).store(target, table, kv_slice, bound)

    works: dict[str, Callable[[], None]] = {
        "memcpy": lambda: np.copyto(ours, theirs),
        "copied and verified": store,
        "copied, no digests": store,
    }
    times_s: dict[str, list[float]] = {name: [] for name in works}
    for number in range(options.rounds + 1):
        for name, work in works.items():
            bare = name == "copied, no digests"
            with without_digests() if bare else contextlib.nullcontext():
                headers = [frame(source, table, kv_slice) for kv_slice in kv_slices]
                began_s = time.thread_time()
                work()
                if number:
                    times_s[name].append(time.thread_time() - began_s)
    bare_s = statistics.median(times_s["memcpy"])
    for name, taken_s in times_s.items():
        median_s = statistics.median(taken_s)
        rate = size_bytes / median_s / 1e9
        sys.stdout.write(f"  {name:22} {rate:6.2f} GB per CPU second, {bare_s / median_s:.2f}\n")


if __name__ == "__main__":
    main()
