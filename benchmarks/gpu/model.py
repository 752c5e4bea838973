"""Decoder with random weights, and the times of its steps. It needs only torch and triton."""

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.engine.cuda.decode_graphs import DecodeRow
from baton.engine.cuda.decoder import CudaDecoder, DecoderShape
from baton.engine.cuda.kernels.attention import Span
from benchmarks.gpu.decode_loop import DecodeLoop

LLAMA_3_8B = DecoderShape(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    max_context_tokens=33_024,
)
TOY = DecoderShape(
    num_layers=1,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    vocab_size=97,
    rms_norm_eps=1e-5,
    max_context_tokens=64,
)
BLOCK = 16
PREFILL_CHUNK = 8192


@dataclass(frozen=True)
class Machine:
    """Device, dtype and model of a run. ``smoke``: toy shapes, to see that everything runs."""

    device: torch.device
    dtype: torch.dtype
    shape: DecoderShape
    smoke: bool

    @property
    def kv_token_bytes(self) -> int:
        """Size of one token's KV over all layers."""
        s = self.shape
        return 2 * s.num_layers * s.num_kv_heads * s.head_dim * self.dtype.itemsize

    def step_weight_bytes(self, *, fp8: bool = False) -> int:
        """Return the size of the weights that every step reads: all layers and the head."""
        s = self.shape
        head = s.vocab_size * s.hidden_size * self.dtype.itemsize
        return s.num_layers * _layer_weights(s) * (1 if fp8 else self.dtype.itemsize) + head

    def free_bytes(self) -> int:
        """Return the free memory, after freeing caches."""
        if self.device.type != "cuda":
            return 64 << 20
        gc.collect()
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info()[0]
        return free

    def timed(self, work: Callable[[], object], repeat: int) -> float:
        """Return the median seconds of ``work``, by the device's clock."""
        if self.device.type != "cuda":
            return statistics.median(_wall(work) for _ in range(repeat))
        times: list[float] = []
        for _ in range(repeat):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def replayed(self, work: Callable[[], object], repeat: int) -> float:
        """Return the median seconds of ``work`` as a CUDA graph: without the host's launches."""
        work()  # compiles
        if self.device.type != "cuda":
            return self.timed(work, repeat)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        return self.timed(graph.replay, repeat)


def _layer_weights(shape: DecoderShape) -> int:
    """Return the number of elements of the four matrices of one layer."""
    attention = shape.qkv_width + shape.num_heads * shape.head_dim
    return shape.hidden_size * (attention + 3 * shape.intermediate_size)


def _wall(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def random_decoder(
    machine: Machine, num_blocks: int, *, exact: bool, fp8: bool = False
) -> CudaDecoder:
    """Return a model of the machine's shape; weights are scaled so that activations stay finite."""
    s = machine.shape
    q = s.num_heads * s.head_dim
    kv = s.num_kv_heads * s.head_dim
    e = s.hidden_size
    f = s.intermediate_size
    sizes = {"q": (q, e), "k": (kv, e), "v": (kv, e), "o": (e, q)}
    sizes |= {"gate": (f, e), "up": (f, e), "down": (e, f)}
    generator = torch.Generator(machine.device).manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=machine.dtype, device=machine.device)
        return weight.normal_(0.0, columns**-0.5, generator=generator)

    weights = {"embed": matrix(s.vocab_size, e), "head": matrix(s.vocab_size, e)}
    weights["final_norm"] = torch.ones(e)
    for i in range(s.num_layers):
        weights |= {f"layers.{i}.{name}": matrix(*size) for name, size in sizes.items()}
        weights |= {f"layers.{i}.{name}": torch.ones(e) for name in ("attn_norm", "mlp_norm")}
    frequencies = 1.0 / 500000.0 ** (torch.arange(0, s.head_dim, 2) / s.head_dim)
    decoder = CudaDecoder(
        s,
        weights,
        [(frequencies, 1.0)],
        dtype=machine.dtype,
        device=machine.device,
        num_blocks=num_blocks,
        block_tokens=BLOCK,
        exact=exact,
        fp8=fp8,
    )
    for layer in decoder.pool:  # zeros would take less power, and so less time
        layer.normal_(generator=generator)
    return decoder


def scattered_tables(decoder: CudaDecoder, batch: int, tokens: int) -> list[list[int]]:
    """Return block tables without neighbours, for ``batch`` sequences of ``tokens`` tokens."""
    width = -(-tokens // decoder.block_tokens)
    order = list(range(decoder.pool.shape[2]))
    random.Random(0).shuffle(order)
    return [order[i * width : (i + 1) * width] for i in range(batch)]


def copy_bandwidth(machine: Machine) -> float:
    """Return the bytes per second, read and written, of a copy on the device."""
    size = (1 << 20) if machine.smoke else (2 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / machine.timed(lambda: target.copy_(source), 10)


def product_rate(machine: Machine) -> float:
    """Return the operations per second of a square matrix product."""
    side = 64 if machine.smoke else 8192
    left = torch.randn(side, side, device=machine.device).to(machine.dtype)
    right = torch.randn(side, side, device=machine.device).to(machine.dtype)
    out = left @ right
    for _ in range(3):
        torch.mm(left, right, out=out)
    return 2 * side**3 / machine.timed(lambda: torch.mm(left, right, out=out), 10)


def decode_step_s(
    machine: Machine, decoder: CudaDecoder, loop: DecodeLoop, batch: int, context: int
) -> float:
    """Return the seconds of a decode step within a run of steps that are not read meanwhile."""
    steps = 2 if machine.smoke else 12
    tables = scattered_tables(decoder, batch, context)
    # ends at ``context``, so that the run stays within its bucket of splits
    start = context - 1 - 2 * (steps + 2)
    loop.start([DecodeRow(7 + i % 50, max(0, start), table) for i, table in enumerate(tables)])
    loop.launch()
    loop.launch()

    def run() -> None:
        for _ in range(steps):
            loop.launch()

    seconds = machine.timed(run, 2 if not machine.smoke else 1) / steps
    while loop.pending:
        loop.read()
    return seconds


def decode_bytes(machine: Machine, batch: int, context: int, *, fp8: bool) -> int:
    """Return the fewest bytes that a step must move: the weights once, and each sequence's KV."""
    return machine.step_weight_bytes(fp8=fp8) + batch * context * machine.kv_token_bytes


def prefill_s(machine: Machine, decoder: CudaDecoder, tokens: int) -> float:
    """Return the seconds for a prompt in one chunk, with its first token's logits."""
    table = scattered_tables(decoder, 1, tokens)
    ids = [(i * 31) % machine.shape.vocab_size for i in range(tokens)]
    batch = decoder.batch(ids, [Span(0, 0, tokens, 0)], table)

    def run() -> None:
        decoder.logits(decoder.forward(batch)[-1:].contiguous())

    run()
    return machine.timed(run, 1 if machine.smoke else 3)


def prefill_operations(machine: Machine, tokens: int) -> int:
    """Return the operations of the layers' products, causal attention and one row of logits."""
    s = machine.shape
    products = 2 * tokens * s.num_layers * _layer_weights(s)
    attention = 2 * s.num_layers * tokens * tokens * s.num_heads * s.head_dim
    return products + attention + 2 * s.vocab_size * s.hidden_size


def workload_s(
    machine: Machine, decoder: CudaDecoder, loop: DecodeLoop, requests: int, prompt: int, new: int
) -> float:
    """Return the seconds for ``requests`` prompts and ``new`` tokens each, from ids to ids."""
    tables = scattered_tables(decoder, requests, prompt + new)
    ids = [(i * 31) % machine.shape.vocab_size for i in range(prompt)]
    together = max(1, PREFILL_CHUNK // prompt)
    began = time.perf_counter()
    first: list[int] = []
    for begin in range(0, requests, together):
        some = tables[begin : begin + together]
        spans = [Span(i * prompt, 0, prompt, i) for i in range(len(some))]
        x = decoder.forward(decoder.batch(ids * len(some), spans, some))
        first += decoder.logits(x[prompt - 1 :: prompt].contiguous()).argmax(-1).tolist()
    rows = zip(first, tables, strict=True)
    loop.start([DecodeRow(token, prompt, table) for token, table in rows])
    ahead = 2
    for step in range(new - 1):
        loop.launch()
        if step >= ahead:
            loop.read()
    while loop.pending:
        loop.read()
    return time.perf_counter() - began
