"""Proof on the loaded model and this device that the CUDA path keeps ``exact``.

All of it uses the first blocks of the pool, and leaves them zero.
"""

# ruff: noqa: N806 - suffixes such as x_TE give shapes

from itertools import pairwise

import torch

from baton.engine.cuda.decode_graphs import DecodeRow, DecodeSteps
from baton.engine.cuda.decoder import CudaDecoder
from baton.engine.cuda.kernels.attention import Span
from baton.engine.cuda.kernels.configs import SPLIT_TOKENS
from baton.engine.models.rope import ROPE_ORDER
from baton.engine.numerics import NumericsSetupError, digest, same_bits
from baton.model.model_config import ModelError
from baton.types.geometry import BLOCK_TOKENS

_PROBE_TOKENS = 2 * SPLIT_TOKENS + 5 * BLOCK_TOKENS + 3  # three splits, the last page not full
_STEP_TOKENS = 2 * BLOCK_TOKENS + 3
_NEAR = 0.1
_BESIDE = 10  # tokens of another sequence in the same step: enough to be a prefill

SELFTEST_BLOCKS = 2 * -(-_PROBE_TOKENS // BLOCK_TOKENS)
"""Most blocks that the self-test uses."""


def verify_exact(decoder: CudaDecoder) -> None:
    """Prove ``exact`` on the loaded model: same bits whole, in odd chunks, and in a batch.

    Each position is decoded too, all in one step. Which keys a query reads with a mask depends on
    its tile, so a kernel that rounds differently there is wrong at some positions only.

    Raises:
        NumericsSetupError: Bits differ; the message names the positions.
        ModelError: The pool is too small.
    """
    length = min(_PROBE_TOKENS, decoder.shape.max_context_tokens)
    tokens = [(7919 * i + 13) % decoder.shape.vocab_size for i in range(length)]
    blocks = -(-length // decoder.block_tokens)
    _need(decoder, 2 * blocks)
    tables = [list(range(blocks)), list(range(2 * blocks - 1, blocks - 1, -1))]

    def run(*parts: tuple[int, int, int]) -> list[torch.Tensor]:
        """Compute parts ``(table, start, end)`` in one step."""
        flat: list[int] = []
        spans = []
        for number, (_, start, end) in enumerate(parts):
            spans.append(Span(len(flat), start, end - start, number))
            flat += tokens[start:end]
        x_TE = decoder.forward(decoder.batch(flat, spans, [tables[t] for t, _, _ in parts]))
        return [x_TE[s.row : s.row + s.count] for s in spans]

    whole = run((0, 0, length))[0].clone()
    for count in (length, min(length, SPLIT_TOKENS)):  # spread over splits, and not
        alone = run(*((0, position, position + 1) for position in range(count)))
        wrong = [p for p, got in enumerate(alone) if not same_bits(got, whole[p : p + 1])]
        if wrong:
            raise NumericsSetupError(
                f"numerics exact: {len(wrong)} of {count} positions decoded alone differ from one "
                f"chunk on {device_name(decoder.device)}, the first is {wrong[0]}; use numerics: "
                "fast"
            )
    cuts = [0, length // 2 - 3, length - 8, length - 7, length - 2, length - 1, length]
    for start, end in pairwise(cuts):
        # beside it, in the same step, the other sequence computes something else
        got = run((1, start, end), (0, 0, min(end, _BESIDE)))[0]
        if not same_bits(got, whole[start:end]):
            raise NumericsSetupError(
                f"numerics exact: positions {start} to {end - 1} computed apart differ from one "
                f"chunk on {device_name(decoder.device)}; use numerics: fast"
            )
    decoder.pool[:, :, : 2 * blocks].zero_()


def verify_steps(decoder: CudaDecoder, steps: DecodeSteps) -> None:
    """Prove that captured steps, padded to their buckets, compute what single launches compute.

    Raises:
        NumericsSetupError: They do not.
        ModelError: The pool is too small.
    """
    for length in (_STEP_TOKENS, decoder.decode_config.split + _STEP_TOKENS):  # one split, and two
        _verify_step(decoder, steps, min(length, decoder.shape.max_context_tokens))


@torch.inference_mode()
def _verify_step(decoder: CudaDecoder, steps: DecodeSteps, length: int) -> None:
    tokens = [(7919 * i + 13) % decoder.shape.vocab_size for i in range(length)]
    ends = [length - 1, length // 2, 1]
    tables: list[list[int]] = []
    used = 0
    for end in ends:
        width = end // decoder.block_tokens + 1
        tables.append(list(range(used, used + width)))
        used += width
    _need(decoder, used)
    flat: list[int] = []
    spans = []
    for number, end in enumerate(ends):
        spans.append(Span(len(flat), 0, end + 1, number))
        flat += tokens[: end + 1]
    x_TE = decoder.forward(decoder.batch(flat, spans, tables))
    expected = x_TE[[span.row + span.count - 1 for span in spans]]
    steps.start(
        [DecodeRow(tokens[end], end, table) for end, table in zip(ends, tables, strict=True)]
    )
    steps.step()
    got = steps.hidden_RE
    same = same_bits(got, expected) if decoder.exact else _near(got, expected)
    if not same:
        where = device_name(decoder.device)
        raise NumericsSetupError(f"a captured decode step differs from single launches on {where}")
    decoder.pool[:, :, :used].zero_()


def _near(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two results are equal up to the rounding of bf16."""
    return bool((left - right).norm() <= _NEAR * right.norm())


def numerics_id(decoder: CudaDecoder, dtype: str) -> str:
    """Return the id that two workers must share for their KV and tokens to be interchangeable."""
    length = min(_PROBE_TOKENS, decoder.shape.max_context_tokens)
    tokens = [(104729 * i + 5) % decoder.shape.vocab_size for i in range(length)]
    blocks = list(range(-(-length // decoder.block_tokens)))
    _need(decoder, len(blocks))
    x_TE = decoder.forward(decoder.batch(tokens, [Span(0, 0, length, 0)], [blocks]))
    logits_SV = decoder.logits(x_TE[-1:].contiguous())
    decoder.pool[:, :, blocks].zero_()
    mode = "exact" if decoder.exact else "fast"
    cut = f"m{decoder.decode_config.block_m}k{decoder.decode_config.kv_tile}"
    cut += f"s{decoder.decode_config.split}"
    bits = digest((x_TE.cpu(), logits_SV.cpu()))
    kinds = f"{dtype}/fp8" if decoder.fp8 else dtype
    return f"{mode}/{kinds}/{ROPE_ORDER}/cuda-{cut}/{bits}"


def _need(decoder: CudaDecoder, blocks: int) -> None:
    """Check the size of the pool: kernels would write into other memory without an error."""
    if decoder.pool.shape[2] < blocks:
        raise ModelError(
            f"kv_blocks_per_worker is {decoder.pool.shape[2]}, the self-test needs {blocks}"
        )


def device_name(device: torch.device) -> str:
    """Return the device's name for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the interpreter"
