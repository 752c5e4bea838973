"""The decoder on CUDA against ``baton/engine/cpu/decoder.py``, and its bits against themselves."""

import dataclasses

import pytest
import torch

from baton.engine.core.plan import StepPlan
from baton.engine.cuda.decoder import CudaDecoder
from baton.engine.cuda.kernels.attention import Span
from baton.engine.cuda.selftest import numerics_id, verify_exact
from baton.engine.numerics import NumericsSetupError, same_bits
from baton.model.artifact import ModelError
from tests.engine.cuda import tiny

SHALLOW = tiny.config(layers=1)


def expected(c: tiny.ModelConfig, dtype: str, text: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    pool = bytearray(tiny.geometry(c, dtype).pool_bytes)
    runner = tiny.torch_runner(c, dtype, pool)
    table = list(range(-(-len(text) // tiny.BLOCK)))
    hidden = runner.hidden(StepPlan((tiny.row(0, text, 0, len(text), table),)))[0]
    with torch.inference_mode():
        return hidden, runner._model.logits(hidden).raw_SV.float()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tied", "dtype", "exact"),
    [
        pytest.param(3, 1, False, "fp32", True, marks=pytest.mark.slow),
        pytest.param(4, 4, True, "fp32", False, marks=pytest.mark.slow),
        pytest.param(8, 2, False, "bf16", True, marks=pytest.mark.slow),
    ],
)
def test_hidden_states_and_logits_are_those_of_the_other_engine(
    heads: int, kv_heads: int, tied: bool, dtype: str, exact: bool
) -> None:
    c = tiny.config(heads, kv_heads, tied=tied)
    text = tiny.tokens(36)
    hidden, logits = expected(c, dtype, text)
    decoder = tiny.decoder(c, dtype, exact=exact)
    table = [7, 3, 9]
    got = []
    for start, end in ((0, 20), (20, 35), (35, 36)):  # prefill, prefill, decode
        batch = decoder.batch(text[start:end], [Span(0, start, end - start, 0)], [table])
        got.append(decoder.forward(batch))
    together = torch.cat(got)
    limit = {"fp32": 1e-5, "bf16": 0.01}[dtype]
    assert (together - hidden).norm() < limit * hidden.norm()
    assert (decoder.logits(together) - logits).norm() < limit * logits.norm()


FAMILIES = {
    "mistral": {"layer_windows": (9, 9)},
    "qwen2": {},
    "qwen3": {},
    "gemma3": {
        "layer_windows": (9, None),
        "local_rope_theta": 50.0,
        "query_scale": 0.2,
        "tie_word_embeddings": True,
    },
}
SLOW_FAMILIES = ("mistral", "qwen2", "qwen3")  # what is left has most of their parts


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow) if f in SLOW_FAMILIES else f for f in FAMILIES],
)
def test_every_family_has_the_hidden_states_of_the_other_engine(family: str) -> None:
    c = dataclasses.replace(tiny.config(), family=family, **FAMILIES[family])
    text = tiny.tokens(30)
    hidden, logits = expected(c, "fp32", text)
    decoder = tiny.decoder(c)
    got = []
    for start, end in ((0, 29), (29, 30)):
        batch = decoder.batch(text[start:end], [Span(0, start, end - start, 0)], [[7, 3]])
        got.append(decoder.forward(batch))
    together = torch.cat(got)
    assert (together - hidden).norm() < 1e-5 * hidden.norm()
    assert (decoder.logits(together[-1:]) - logits[-1:]).norm() < 1e-5 * logits[-1:].norm()


@pytest.mark.slow
def test_fp8_weights_change_the_hidden_states_by_their_rounding() -> None:
    c = dataclasses.replace(SHALLOW, hidden_size=32, intermediate_size=48)
    text, found = tiny.tokens(12), []
    for fp8 in (False, True):
        decoder = tiny.decoder(c, "bf16", fp8=fp8)
        found.append(decoder.forward(decoder.batch(text, [Span(0, 0, 12, 0)], [[2]])))
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert 0.001 < error < 0.1
    assert numerics_id(decoder, "bf16").startswith("exact/bf16/fp8/")


@pytest.mark.slow
def test_exact_bits_depend_neither_on_the_batch_nor_on_the_chunks() -> None:
    decoder = tiny.decoder(SHALLOW)
    verify_exact(decoder)
    assert not decoder.pool.any(), "what the proof wrote is gone"
    small = tiny.decoder(SHALLOW)
    small.pool = small.pool[:, :, :5]
    with pytest.raises(ModelError, match="kv_blocks_per_worker is 5, the self-test needs 6"):
        verify_exact(small)


@pytest.mark.slow
def test_a_device_that_sums_otherwise_in_a_batch_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = tiny.decoder(SHALLOW)
    forward = CudaDecoder.forward

    def by_batch(self: CudaDecoder, batch: object, *rest: object) -> torch.Tensor:
        x = forward(self, batch, *rest)  # type: ignore[arg-type]
        return x * (1 + 2**-20) if x.shape[0] == 11 else x

    monkeypatch.setattr(CudaDecoder, "forward", by_batch)
    with pytest.raises(NumericsSetupError, match="the interpreter; use numerics: fast"):
        verify_exact(decoder)


@pytest.mark.slow
def test_the_numerics_id_names_mode_dtype_and_cut() -> None:
    exact = numerics_id(tiny.decoder(SHALLOW), "fp32")
    assert exact.startswith("exact/fp32/adjacent/cuda-m64k64s512/")
    assert numerics_id(tiny.decoder(SHALLOW, exact=False), "fp32").startswith("fast/fp32/")


def test_sequences_with_few_queries_are_spread_over_their_keys() -> None:
    decoder = tiny.decoder()
    spans = [Span(0, 20, 1, 0), Span(1, 3, 8, 1), Span(9, 0, 9, 2)]
    batch = decoder.batch(tiny.tokens(18), spans, [[1, 2], [3], [4]])
    (few, _), (many, _) = batch.launches
    assert (few.items_2I, few.max_queries, few.table_5N[0].tolist()) == (None, 8, [0, 1])
    assert (many.items_2I, many.table_5N[0].tolist()) == (None, [9])
    assert batch.positions_T.tolist() == [20, *range(3, 11), *range(9)]


def test_a_position_beyond_the_context_is_refused() -> None:
    decoder = tiny.decoder(SHALLOW)
    with pytest.raises(ValueError, match="position 36 is beyond the context of 36 tokens"):
        decoder.batch([5], [Span(0, 36, 1, 0)], [[0, 1, 2]])


def test_a_verified_draft_has_the_bits_of_decoding() -> None:
    decoder = tiny.decoder(SHALLOW)
    text, table = tiny.tokens(21), [5, 2]
    decoder.forward(decoder.batch(text[:17], [Span(0, 0, 17, 0)], [table]))
    one_by_one = [
        decoder.forward(decoder.batch(text[p : p + 1], [Span(0, p, 1, 0)], [table]))
        for p in range(17, 21)
    ]
    decoder.pool[:, :, 2, 1:].zero_()
    verified = decoder.forward(decoder.batch(text[17:], [Span(0, 17, 4, 0)], [table]))
    assert same_bits(verified, torch.cat(one_by_one))
