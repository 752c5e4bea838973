"""All layers in one native call have the bits of the pass that calls kernel by kernel."""

import itertools
from pathlib import Path

import pytest
import torch

from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.cpu.load import load_model
from baton.engine.cpu.native import attention, layers, products
from baton.engine.cpu.native.library import load
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cpu.selftest import attention_tiling
from baton.engine.loading.memory import kv_geometry
from baton.engine.numerics import same_bits
from baton.model.artifact import resolve_model
from tests.engine.cpu.native_ways import WAYS

pytest.importorskip("transformers")

from tests.engine import tiny_models as tiny

pytestmark = pytest.mark.skipif(
    load() is None, reason="no native kernels here: they need a compiler and AVX2"
)

LENGTH = 90
CASES = [
    *((name, "none", "bf16", "emulate") for name in tiny.MODELS),
    *itertools.product(["llama"], ["none"], ["bf16"], [way for way in WAYS if way != "emulate"]),
    ("gemma3", "int8", "int8", "emulate"),
    ("llama", "int8", "fp8", "vdp"),
    ("llama", "int4", "bf16", "emulate"),
]


@pytest.mark.parametrize(("name", "weights", "stored", "way"), CASES)
def test_a_pass_has_the_same_bits_with_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name, weights, stored, way
) -> None:
    for module in (attention, layers, products):
        monkeypatch.setattr(module, "sums", lambda: WAYS[way])
    folder = tiny.save(tiny.build(name), tmp_path / "model")
    artifact = resolve_model(str(folder))
    config = artifact.config
    with torch.inference_mode():
        model = load_model(artifact, "bf16", "exact", quantisation=weights)
        tiling = attention_tiling(config, "bf16", "exact", stored)
    geometry = kv_geometry(config, stored, 32)
    runner = CpuRunner(model, bytearray(geometry.pool_bytes), geometry, tiling)
    tokens = tiny.tokens(LENGTH)
    table = [(7 * i) % 32 for i in range(-(-LENGTH // 16))]
    ends = (40, 41, 42, LENGTH)

    def hidden() -> torch.Tensor:
        parts = []
        for start, end in itertools.pairwise((0, *ends)):
            row = PlanRow(sequence_id=0, tokens=tokens[start:end], start=start, block_ids=table)
            parts += runner.hidden(StepPlan((row,)))
        return torch.cat(parts)

    native = runner._layers
    if config.num_experts:
        assert native is None
        return
    if native is None:
        assert config.head_dim not in (32, 64, 96, 128, 256)
        pytest.fail(f"{name}: the tiny model suits no native kernel")
    at_once = hidden()
    runner._layers = None
    assert same_bits(hidden(), at_once)


def test_layers_are_told_as_their_kv_is_written(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path / "model")
    artifact = resolve_model(str(folder))
    with torch.inference_mode():
        model = load_model(artifact, "bf16", "exact")
        tiling = attention_tiling(artifact.config, "bf16", "exact")
    geometry = kv_geometry(artifact.config, "bf16", 8)
    pool = bytearray(geometry.pool_bytes)
    runner = CpuRunner(model, pool, geometry, tiling)
    assert runner._layers is not None
    row = PlanRow(sequence_id=0, tokens=tiny.tokens(20), start=0, block_ids=[3, 5])
    seen = []

    def done(count: int) -> None:
        layers_TE = runner._pool[:, :, 3].float().abs().flatten(1).sum(1)
        seen.append((count, [bool(layer) for layer in layers_TE > 0]))

    runner.execute(StepPlan((row,)), done)
    num = artifact.config.num_layers
    assert seen == [(i, [True] * i + [False] * (num - i)) for i in range(1, num + 1)]
