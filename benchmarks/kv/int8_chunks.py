"""What int8 chunks cost: CPU time at both ends, and what they change in SmolLM2's answers.

    python -m benchmarks.kv.int8_chunks [--rounds 7] [--tokens 1024] [--answer 48]

The first counts the thread's own CPU time for KV of an 8B model. The second computes prompts, puts
the whole pool through int8 and back, as a hand-off would, and answers from the blocks in it; and
once more from blocks that were left alone. The last, partial block is computed again both times.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from batonpb.common_pb2 import INT8, PLAIN, ChunkEncoding

from baton.engine.llm import LLM, Output
from benchmarks.handoff import geometry, page_table, rectangles
from kvtransfer import chunk
from kvtransfer.grpc_transport import GrpcTransport
from kvtransfer.int8_chunks import decode_int8, encode_int8
from kvtransfer.kv_slice import KvSlice, cut

BOUND = chunk.binding("r", 1, 1, b"i" * 16)
PROMPTS = (
    "The water cycle begins when the sun heats the oceans, and water rises as vapour. Then",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who had",
    "def fibonacci(n):\n    '''The n-th number of Fibonacci.'''\n    if n < 2:\n        return n\n",
    "Dear Sir or Madam,\n\nI am writing to complain about the train that I took on Monday, which",
    "Photosynthesis is how plants make sugar from light. It takes place in the chloroplasts, and",
    "The three most important things to know about the French Revolution are these. First,",
    "Recipe for pancakes. You need: 200 g of flour, 3 eggs, half a litre of milk, salt. Begin by",
    "Question: a train goes 60 km in 45 minutes. How fast is it, in kilometres per hour? Answer:",
)


TEXTS = ["\n\n".join(PROMPTS[i + 1 :] + PROMPTS[: i + 1]) for i in range(len(PROMPTS))]


def coding(tokens: int, rounds: int) -> None:
    """One line for each encoding: MB of plain KV per CPU second at either end, and at both."""
    shape, table = geometry(tokens), page_table(tokens, scattered=False)
    noise = np.random.default_rng(1).standard_normal(shape.pool_bytes // 2, np.float32)
    memory = bytearray((noise.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    source = chunk.PoolView(memory, shape)
    target = chunk.PoolView(bytearray(shape.pool_bytes), shape)
    pieces = [
        piece
        for kv_slice in rectangles(shape, tokens)
        for piece in cut(kv_slice, shape, GrpcTransport.frame_bytes)
    ]
    size_mb = sum(piece.payload_bytes(shape) for piece in pieces) / 1e6
    for name, encoding in (("plain", PLAIN), ("int8", INT8)):
        spent_s = [
            _both_ends_s(source, target, table, pieces, encoding) for _ in range(rounds + 1)
        ][1:]
        sender_s, reader_s = (statistics.median(times) for times in zip(*spent_s, strict=True))
        rates = [size_mb / s for s in (sender_s, reader_s, sender_s + reader_s)]
        sys.stdout.write(
            "  {:6} sender {:6.0f}, reader {:6.0f}, both {:6.0f}\n".format(name, *rates)
        )


def _both_ends_s(
    source: chunk.PoolView,
    target: chunk.PoolView,
    table: tuple[int, ...],
    pieces: list[KvSlice],
    encoding: ChunkEncoding,
) -> tuple[float, float]:
    """CPU seconds of the sender and of the reader, without gRPC."""
    sender_s = reader_s = 0.0
    for piece in pieces:
        frame = memoryview(bytearray(chunk.payload_bytes(piece, source.geometry, encoding)))
        began_s = time.thread_time()
        said = source.copy_out(table, piece, BOUND, frame, encoding)
        sent_s = time.thread_time()
        if not target.place(table, piece, BOUND, frame, said, encoding):
            raise RuntimeError("a digest does not fit")
        sender_s, reader_s = sender_s + sent_s - began_s, reader_s + time.thread_time() - sent_s
    return sender_s, reader_s


def answers(answer_tokens: int) -> None:
    """One line for each: how many tokens agree, and how far apart their log-probabilities are."""
    llm = LLM(numerics="fast", kv_blocks=512)
    pool = llm.runner._pool  # noqa: SLF001 - the engine has no such door, and needs none

    def answer() -> list[Output]:
        return llm.generate(
            TEXTS, max_tokens=answer_tokens, temperature=0.0, logprobs=0, ignore_eos=True
        )

    def through_int8() -> None:
        plain = pool.view(torch.uint8).numpy().reshape(-1).data
        dim = llm.runner.geometry.head_dim
        coded = memoryview(bytearray(len(plain) // (2 * dim) * (dim + 4)))
        encode_int8(plain, dim, coded)
        plain[:] = decode_int8(coded, dim)

    alone = _from_cache(llm, answer, lambda: None)
    for name, between in (("left alone again", lambda: None), ("int8", through_int8)):
        said = _compared(alone, _from_cache(llm, answer, between), answer_tokens)
        sys.stdout.write(f"  {name}: {said}\n")


def _compared(left: list[Output], right: list[Output], answer_tokens: int) -> str:
    agree, differences = [], []
    for one, other in zip(left, right, strict=True):
        agree.append(0)
        for a, b in zip(one.tokens, other.tokens, strict=True):
            if a.token != b.token:
                break
            agree[-1] += 1
            differences.append(abs((a.logprob or 0.0) - (b.logprob or 0.0)))
    parted = sorted(tokens for tokens in agree if tokens < answer_tokens)
    return (
        f"{len(agree) - len(parted)} of {len(agree)} answers of {answer_tokens} tokens are the "
        f"same, others for their first {parted} tokens; log-probabilities of the same tokens "
        f"differ by {statistics.mean(differences):.4f} on average, {max(differences):.4f} at most"
    )


def _from_cache(
    llm: LLM, answer: Callable[[], list[Output]], between: Callable[[], None]
) -> list[Output]:
    """Answers from blocks of the prompts that were computed before, and then changed."""
    llm.generate(TEXTS, max_tokens=1, temperature=0.0)
    between()
    outputs = answer()
    if not all(output.cached_tokens for output in outputs):
        raise RuntimeError("an answer did not read the cache")
    return outputs


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--answer", type=int, default=48)
    options = parser.parse_args()
    sys.stdout.write("MB of KV per CPU second, without gRPC\n")
    coding(options.tokens, options.rounds)
    sys.stdout.write("SmolLM2, greedy, from KV that was int8 on its way and from KV that was not\n")
    answers(options.answer)


if __name__ == "__main__":
    main()
