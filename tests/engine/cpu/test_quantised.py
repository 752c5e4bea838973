"""int8 and int4 weights, KV in int8 and fp8: near what they stand for, and exact as ever."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.cpu import quantised
from baton.engine.cpu.attention import AttentionTiling
from baton.engine.cpu.decoder import Decoder
from baton.engine.cpu.kv_codec import KvCodec, _widened
from baton.engine.cpu.linear import Linear
from baton.engine.cpu.load import load_model
from baton.engine.cpu.quantised import (
    Int4Linear,
    Int8Linear,
    IntegerKernelError,
    check_integer_kernel,
    packer,
    quantise_groups,
)
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cpu.selftest import attention_tiling, numerics_id, verify_exact
from baton.engine.loading.memory import kv_geometry
from baton.engine.numerics import same_bits
from baton.model.artifact import ModelArtifact, ModelError, resolve_model
from baton.types.errors import NumericsError
from baton.types.geometry import KvGeometry
from baton.types.params import SamplingParams
from tests.engine.conftest import Driver
from tests.engine.cpu.integer_kernel import needs_integer_products
from tests.engine.cpu.test_runner import prompt_of

pytestmark = needs_integer_products

Make = Callable[[str, str], Driver]

BF16 = torch.bfloat16
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SEEDED = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.95, seed=1234)
COMBINATIONS = [("int8", "int8"), ("int4", "fp8")]


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


# --- one layer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (functools.partial(Int8Linear, digits=1), 0.015),
        (Int8Linear, 0.011),
        (Int4Linear, 0.11),
    ],
    ids=["int8 with one digit", "int8", "int4"],
)
def test_a_quantised_product_is_near_the_plain_one_and_blind_to_its_neighbours(
    make: Callable[[torch.Tensor], Linear], limit: float
) -> None:
    weight, x = torch.randn(96, 160).to(BF16), torch.randn(70, 160).to(BF16)
    layer = make(weight)
    whole = layer(x)
    assert relative_error(whole, x.float() @ weight.float().T) < limit
    for start, end in ((0, 1), (3, 5), (10, 43), (69, 70)):
        assert same_bits(layer(x[start:end]), whole[start:end])
    layer.check()


def test_the_second_digit_leaves_only_the_error_of_the_weights() -> None:
    weight = torch.randint(-127, 128, (64, 96)).float()
    weight[:, 0] = 127.0  # so that the scale of every output is 1: the weights lose nothing
    x = torch.randn(9, 96)
    assert relative_error(Int8Linear(weight, digits=1)(x), x @ weight.T) > 2e-3
    assert relative_error(Int8Linear(weight)(x), x @ weight.T) < 1e-4


def test_the_weight_that_was_given_stays_as_it_is() -> None:
    weight = torch.randn(32, 64)
    before = weight.clone()
    Int8Linear(weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("make", [Int8Linear, Int4Linear])
def test_a_weight_is_quantised_in_slices_that_do_not_show(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[torch.Tensor], Linear]
) -> None:
    weight, x = torch.randn(96, 160).to(BF16), torch.randn(5, 160).to(BF16)
    monkeypatch.setattr("baton.engine.cpu.quantised._SLICE_VALUES", 96 * 160)
    whole = make(weight)(x)
    for rows in (1, 7, 95):
        monkeypatch.setattr("baton.engine.cpu.quantised._SLICE_VALUES", rows * 160)
        assert same_bits(make(weight)(x), whole)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_0"])
def test_the_levels_of_a_gguf_file_are_found_again(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(0, 16, (48, 3, 32), generator=generator).float()
    scale = torch.randn(48, 3, 1, generator=generator).half().float()
    if kind == "Q4_1":
        levels[..., 0], levels[..., 1] = 0, 15  # its own quantiser uses least and greatest
        offset = torch.randn(48, 3, 1, generator=generator).half().float()
    else:
        levels[..., 0] = 0  # the value of greatest size is level 0
        offset = -8 * scale
    weight = (levels * scale + offset).to(BF16).float()  # as it comes out of the cache
    found, scales, offsets = quantise_groups(weight.view(48, 96))
    again = found * scales[..., None] + offsets[..., None]
    assert relative_error(again, weight) < 4e-3  # bf16 keeps 8 bits


def test_zeros_stay_zeros() -> None:
    x = torch.randn(3, 64).to(BF16)
    for layer in (
        Int8Linear(torch.zeros(16, 64).to(BF16)),
        Int4Linear(torch.zeros(16, 64, dtype=BF16)),
    ):
        assert not layer(x).any()
    assert not Int8Linear(torch.randn(16, 64).to(BF16))(torch.zeros(3, 64).to(BF16)).any()


def test_a_kernel_that_overflows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_integer_kernel()
    monkeypatch.setattr(quantised, "int8_fits", lambda dtype: False)
    real = Int8Linear._integer_product

    def saturating(self: Int8Linear, whole: torch.Tensor) -> torch.Tensor:
        return real(self, whole).clamp_(-(2.0**15), 2.0**15)

    monkeypatch.setattr(Int8Linear, "_integer_product", saturating)
    with pytest.raises(IntegerKernelError, match="integer products of this CPU overflow"):
        check_integer_kernel()


@pytest.mark.parametrize(
    ("quantisation", "dtype", "said"),
    [
        ("int4", "fp32", "int4 does not support dtype fp32; use bf16"),
        ("int3", "bf16", "'int3' is not supported"),
        ("fp8", "bf16", "fp8 needs CUDA"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    artifact: ModelArtifact, quantisation: str, dtype: str, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        load_model(artifact, dtype, "exact", quantisation=quantisation)


def test_a_shape_that_the_int4_kernel_does_not_take_is_named() -> None:
    with pytest.raises(ModelError, match="down is 48 x 72"):
        packer("int4", "bf16")("down", torch.zeros(48, 72, dtype=BF16))


# --- the KV cache ------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "limit"), [("int8", 0.008), ("fp8", 0.03)])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_what_is_stored_of_a_vector_depends_on_nothing_else(
    kind: str, limit: float, dtype: torch.dtype
) -> None:
    codec = KvCodec(kind, dtype)
    kv = torch.randn(2, 40, 3, 64).to(dtype) * torch.logspace(-3, 2, 40).view(1, 40, 1, 1).to(dtype)
    stored = codec.encode(kv)
    assert stored.shape == (2, 40, 3, 68)
    for token in (0, 17, 39):
        assert torch.equal(codec.encode(kv[:, token : token + 1]), stored[:, token : token + 1])
        assert relative_error(codec.decode(stored)[:, token], kv[:, token]) < limit
    strided = stored.transpose(1, 2)[:, :2]
    assert same_bits(codec.decode(strided), codec.decode(stored).transpose(1, 2)[:, :2])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_fp8_bits_are_widened_as_torch_does_it(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F]  # NaN, which comes with a scale that is NaN
    wide = _widened(every.view(torch.int8), dtype)
    assert torch.equal(wide, every.view(torch.float8_e4m3fn).to(dtype))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_empty_pool_reads_as_zero_and_nan_stays_nan(kind: str) -> None:
    codec = KvCodec(kind, BF16)
    assert not codec.decode(torch.zeros(4, 68, dtype=torch.uint8)).any()
    assert not codec.decode(codec.encode(torch.zeros(4, 64, dtype=BF16))).any()
    bad = torch.ones(2, 64, dtype=BF16)
    bad[0, 5], bad[1, 5] = float("nan"), float("inf")
    assert not codec.decode(codec.encode(bad))[:, 5].isfinite().any()


def test_the_scale_counts_in_the_size_of_the_pool() -> None:
    sizes = {
        dtype: KvGeometry(
            num_layers=30, num_kv_heads=3, head_dim=64, num_blocks=1, dtype=dtype
        ).block_bytes
        for dtype in ("bf16", "int8", "fp8")
    }
    assert sizes["bf16"] == 30 * 2 * 16 * 3 * 128
    assert sizes["int8"] == sizes["fp8"] == 30 * 2 * 16 * 3 * 68


# --- the real model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(artifact: ModelArtifact) -> Callable[[str], tuple[Decoder, AttentionTiling]]:
    with torch.inference_mode():
        tiling = attention_tiling(artifact.config, "bf16", "exact", "int8")

    @functools.cache
    def load(weights: str) -> tuple[Decoder, AttentionTiling]:
        with torch.inference_mode():
            return load_model(artifact, "bf16", "exact", quantisation=weights), tiling

    return load


@pytest.fixture(scope="module")
def make(artifact: ModelArtifact, loaded: Callable[[str], tuple[Decoder, AttentionTiling]]) -> Make:
    def build(weights: str, kv: str) -> Driver:
        model, tiling = loaded(weights)
        geometry = kv_geometry(artifact.config, kv, 160)
        return Driver(CpuRunner(model, bytearray(geometry.pool_bytes), geometry, tiling, (2,)))

    return build


@pytest.mark.parametrize(
    ("weights", "kv"), [COMBINATIONS[0], pytest.param(*COMBINATIONS[1], marks=pytest.mark.slow)]
)
def test_the_same_request_gives_the_same_tokens_whatever_the_path(
    make: Make, weights: str, kv: str
) -> None:
    driver = make(weights, kv)
    prompt = prompt_of(100)
    alone = driver.answer(prompt, SEEDED)
    for chunks, scattered in (([7, 1, 64], False), ([50, 49], True)):
        assert driver.answer(prompt, SEEDED, chunks=chunks, scattered=scattered) == alone

    # preempted after 3 tokens: prompt and answer are computed again in one go
    tokens = prompt + alone[:3]
    table = driver.blocks(len(tokens) + 1)
    row = driver.row(tokens, 0, len(tokens), table, prompt=len(prompt), params=SEEDED)

    # behind a prefix that another request computed, while that one is computed again
    first, second = driver.blocks(96), driver.blocks(16)
    driver.prefill(prompt, first, [33, 63])
    behind = driver.row(prompt, 96, 100, first + second, prompt=100, params=SEEDED)
    drawn = driver.step(row, behind)
    assert [answers[0].token for answers in drawn] == [alone[3], alone[0]]


@pytest.mark.parametrize(("weights", "kv"), COMBINATIONS)
def test_a_batch_gives_the_hidden_states_of_each_alone(make: Make, weights: str, kv: str) -> None:
    driver = make(weights, kv)
    prompts = [prompt_of(18 + 7 * i, seed=i) for i in range(6)]
    tables = [driver.blocks(len(prompt), scattered=i % 2 == 1) for i, prompt in enumerate(prompts)]

    def decode(*wanted: int) -> list[torch.Tensor]:
        rows = (
            driver.row(prompts[i], len(prompts[i]) - 1, len(prompts[i]), tables[i]) for i in wanted
        )
        return driver.runner.hidden(StepPlan(tuple(rows)))

    for prompt, table in zip(prompts, tables, strict=True):
        driver.prefill(prompt, table, [len(prompt) - 1])
    together = decode(*range(6))
    for i in range(6):
        assert same_bits(decode(i)[0], together[i])


def test_the_numerics_id_tells_quantisations_apart(
    loaded: Callable[[str], tuple[Decoder, AttentionTiling]],
) -> None:
    identities = set()
    for weights, kv in [("int8", ""), ("int8", "int8")]:
        model, tiling = loaded(weights)
        identities.add(numerics_id(model, tiling, "bf16", "exact", kv))
    assert len(identities) == 2
    assert all(identity.startswith("exact/bf16/int8") for identity in identities)


def test_damaged_kv_is_a_typed_error_and_leaves_zeros(make: Make) -> None:
    driver = make("int8", "int8")
    good, bad = prompt_of(20, seed=1), prompt_of(36, seed=2)
    good_table, bad_table = driver.blocks(32), driver.blocks(48)  # neighbours in the pool
    driver.step(driver.row(bad, 0, 32, bad_table))
    good_row = driver.row(good, 0, 20, good_table, prompt=20, params=GREEDY)
    bad_row = driver.row(bad, 32, 36, bad_table, prompt=36, params=GREEDY)
    expected = driver.step(good_row)
    scale = driver.runner._pool[4, 0, bad_table[1], 3, 0, 64:].view(torch.float32)
    scale.fill_(float("nan"))
    with pytest.raises(NumericsError) as caught:
        driver.step(good_row, bad_row)
    assert caught.value.rows == (1,)  # type: ignore[attr-defined]
    assert not driver.runner._pool[:, :, bad_table[2]].any()
    assert driver.step(good_row) == expected


@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize(("weights", "kv"), COMBINATIONS)
def test_windows_norms_and_experts_go_with_it(
    tmp_path: Path, name: str, weights: str, kv: str
) -> None:
    """Not far from the plain model (random experts flip easily), and exact."""
    pytest.importorskip("transformers")
    from tests.engine import tiny_models as tiny

    changes = {"moe_intermediate_size": 64} if name == "qwen3_moe" else {}  # int4: by 32
    artifact = resolve_model(str(tiny.save(tiny.build(name, **changes), tmp_path / "model")))
    tokens = tiny.tokens(90)
    hidden = {}
    with torch.inference_mode():
        tiling = attention_tiling(artifact.config, "bf16", "exact", kv)
        for kind, kv_dtype in (("none", "bf16"), (weights, kv)):
            model = load_model(artifact, "bf16", "exact", quantisation=kind)
            geometry = kv_geometry(artifact.config, kv_dtype, 8)
            runner = CpuRunner(model, bytearray(geometry.pool_bytes), geometry, tiling)
            plan = StepPlan((PlanRow(sequence_id=0, tokens=tokens, start=0, block_ids=range(6)),))
            hidden[kind] = runner.hidden(plan)[0]
    assert relative_error(hidden[weights], hidden["none"]) < {"int8": 0.15, "int4": 0.7}[weights]
    verify_exact(model, tiling, "bf16", kv)
