"""From settings to a runner on CUDA, and what is refused there by name."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.engine import build
from baton.engine.core.speculative.proposers import SpeculationSettings
from baton.engine.cpu import build as cpu_build
from baton.engine.cuda import build as cuda_build
from baton.engine.cuda.decode_graphs import DecodeSteps
from baton.engine.cuda.selftest import verify_steps
from baton.engine.numerics import NumericsSetupError
from baton.engine.settings import EngineSettings
from baton.model.artifact import ModelError
from baton.types.geometry import KvGeometry
from baton.types.params import SamplingParams
from tests.engine.cuda import tiny

SHALLOW = tiny.config(layers=1)
SETTINGS = EngineSettings(model="tiny", dtype="fp32", kv_blocks=8, device="cuda")


@pytest.fixture
def artifact(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cuda_build, "load_weights", lambda _, dtype: tiny.weights(SHALLOW, dtype))
    found = SimpleNamespace(
        source="tiny", architecture="llama", config=SHALLOW, weights_digest=b"digest"
    )
    monkeypatch.setattr(build, "resolve_model", lambda _: found)
    return found


def memory(geometry: KvGeometry) -> memoryview:
    return memoryview(bytearray(geometry.pool_bytes))


@pytest.mark.slow
def test_a_model_is_loaded_proven_and_wrapped(artifact: Any) -> None:
    said: list[str] = []
    made, info = cuda_build.build_cuda_runner(
        SETTINGS, artifact, 36, memory, said.append, device=tiny.CPU
    )
    assert said[-1] == "checking that numerics are exact on the interpreter"
    assert info.numerics_id.startswith("exact/fp32/adjacent/cuda-")
    assert (info.weights_digest, info.max_context_tokens) == (b"digest", 36)
    assert made.eos_token_ids == (2,)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    drawn = tiny.step(made, tiny.row(1, tiny.tokens(9), 0, 9, [3], params))
    twin = tiny.torch_runner(SHALLOW, "fp32", bytearray(1 << 20))
    assert drawn == tiny.step(twin, tiny.row(1, tiny.tokens(9), 0, 9, [3], params))


@pytest.mark.parametrize(
    ("device", "has_gpu", "cuda"),
    [("cuda", False, True), ("auto", True, True), ("auto", False, False), ("cpu", True, False)],
)
def test_the_device_is_the_setting_and_auto_is_what_is_there(
    monkeypatch: pytest.MonkeyPatch, artifact: Any, device: str, has_gpu: bool, cuda: bool
) -> None:
    class OnTheCpuError(Exception):
        pass

    def on_the_cpu(*_: object, **__: object) -> None:
        raise OnTheCpuError

    marker = object()
    monkeypatch.setattr(cuda_build, "build_cuda_runner", lambda *_: marker)
    monkeypatch.setattr(cpu_build, "load_model", on_the_cpu)
    monkeypatch.setattr(build.torch.cuda, "is_available", lambda: has_gpu)
    settings = msgspec.structs.replace(SETTINGS, device=device)
    if cuda:
        assert build.build_runner(settings, memory, print) is marker
    else:
        with pytest.raises(OnTheCpuError):
            build.build_runner(settings, memory, print)


def test_a_pool_that_nobody_sized_has_blocks(
    monkeypatch: pytest.MonkeyPatch, artifact: Any
) -> None:
    monkeypatch.setattr(cuda_build, "make_decoder", lambda c, weights, geometry, *_, **__: geometry)
    monkeypatch.setattr(cuda_build, "verify_exact", lambda _: None)
    monkeypatch.setattr(cuda_build, "numerics_id", lambda geometry, _: geometry.num_blocks)
    monkeypatch.setattr(cuda_build, "CudaAdapters", lambda *_: None)
    monkeypatch.setattr(
        cuda_build,
        "CudaRunner",
        lambda *_: SimpleNamespace(steps=steps, host_pool=pool),
    )
    monkeypatch.setattr(cuda_build, "verify_steps", lambda *_: None)
    steps = DecodeSteps(tiny.decoder(SHALLOW), 1)
    pool = SimpleNamespace(verify=lambda: None)
    automatic = msgspec.structs.replace(SETTINGS, kv_blocks=0)
    _, info = cuda_build.build_cuda_runner(automatic, artifact, 36, memory, print, device=tiny.CPU)
    context_blocks = -(-SHALLOW.max_context_tokens // tiny.BLOCK)
    assert info.numerics_id == automatic.max_batch_requests * context_blocks


def test_a_pool_fits_beside_the_weights_or_is_refused() -> None:
    geometry = tiny.geometry(SHALLOW, "fp32")
    geometry = msgspec.structs.replace(geometry, num_blocks=1000)
    whole = geometry.block_bytes * 1000
    assert cuda_build.fit_pool(geometry, 0, 2 * whole, chosen=True) is geometry
    smaller = cuda_build.fit_pool(geometry, whole // 4, whole, chosen=False)
    assert smaller.num_blocks == 600
    with pytest.raises(ModelError, match="kv_blocks_per_worker is 1000, limit 600"):
        cuda_build.fit_pool(geometry, whole // 4, whole, chosen=True)
    with pytest.raises(ModelError, match="limit 0"):
        cuda_build.fit_pool(geometry, whole, whole, chosen=False)


def test_rope_scaling_reaches_the_device() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    scaled = dataclasses.replace(SHALLOW, rope_scaling=yarn)
    turned = tiny.decoder(scaled)._layers[0].rotation
    twin = tiny.torch_runner(scaled, "fp32", bytearray(1 << 20))._model
    (expected,) = twin.rotations(tiny.torch.arange(len(turned)))
    assert tiny.torch.allclose(turned, tiny.torch.view_as_real(expected[:, 0]))


def test_other_architectures_and_settings_are_refused_by_name(artifact: Any) -> None:
    artifact.architecture = "Qwen3MoeForCausalLM"
    artifact.config = dataclasses.replace(SHALLOW, num_experts=4, experts_per_token=2)
    with pytest.raises(ModelError, match=r"Qwen3Moe.*mixture.*not supported on CUDA.*hide the GPU"):
        cuda_build.build_cuda_runner(SETTINGS, artifact, 36, memory, print, device=tiny.CPU)
    artifact.config = dataclasses.replace(SHALLOW, rope_layers=(True, False))
    with pytest.raises(ModelError, match="with layers without RoPE, is not supported on CUDA"):
        cuda_build.build_cuda_runner(SETTINGS, artifact, 36, memory, print, device=tiny.CPU)
    artifact.config = SHALLOW
    wide = msgspec.structs.replace(SETTINGS, max_batch_requests=1025)
    with pytest.raises(ModelError, match="max_batch_requests is 1025, limit on CUDA 1024"):
        cuda_build.build_cuda_runner(wide, artifact, 36, memory, print, device=tiny.CPU)
    strange = msgspec.structs.replace(SETTINGS, emulated_token_s=1.0)
    with pytest.raises(ModelError, match="emulated_token_s is not supported on CUDA"):
        cuda_build.build_cuda_runner(strange, artifact, 36, memory, print, device=tiny.CPU)


@pytest.mark.parametrize(
    ("kept", "dtype", "said"),
    [
        ("int8", "bf16", "int8 is not supported on CUDA; use fp8"),
        ("fp8", "fp32", "fp8 does not support dtype fp32; use bf16"),
        ("fp8", "bf16", "width 24 is not a multiple of 16"),
    ],
)
def test_quantised_weights_are_fp8_of_even_widths(
    artifact: Any, kept: str, dtype: str, said: str
) -> None:
    settings = msgspec.structs.replace(SETTINGS, weight_quantisation=kept, dtype=dtype)
    with pytest.raises(ModelError, match=said):
        cuda_build.build_cuda_runner(settings, artifact, 36, memory, print, device=tiny.CPU)


@pytest.mark.slow
def test_a_draft_model_is_refused_and_a_step_that_differs_is_found_out(
    monkeypatch: pytest.MonkeyPatch, artifact: Any
) -> None:
    speculation = SpeculationSettings(mode="draft", draft="small")
    drafting = msgspec.structs.replace(SETTINGS, speculation=speculation)
    with pytest.raises(ModelError, match="a draft model is not supported on CUDA"):
        cuda_build.build_cuda_runner(drafting, artifact, 36, memory, print, device=tiny.CPU)
    decoder = tiny.decoder(SHALLOW)
    steps = DecodeSteps(decoder, 3)
    verify_steps(decoder, steps)
    assert not decoder.pool.any(), "what the proof wrote is gone"
    compute = DecodeSteps.step

    def otherwise(self: DecodeSteps) -> None:
        compute(self)
        self.hidden_RE.mul_(1 + 2**-20)

    monkeypatch.setattr(DecodeSteps, "step", otherwise)
    with pytest.raises(NumericsSetupError, match="differs from single launches"):
        verify_steps(decoder, steps)


def test_weights_that_would_be_ignored_are_refused() -> None:
    weights = tiny.weights(SHALLOW, "fp32") | {"layers.0.router": tiny.torch.zeros(48)}
    geometry = tiny.geometry(SHALLOW, "fp32")
    with pytest.raises(ModelError, match=r"unused weights on CUDA: layers\.0\.router"):
        cuda_build.make_decoder(SHALLOW, weights, geometry, tiny.CPU, 36, exact=True)


def test_heads_that_no_tile_holds_are_refused() -> None:
    wide = dataclasses.replace(SHALLOW, num_heads=65, head_dim=2)
    with pytest.raises(ModelError, match="65 heads share a KV head; a tile has 64 rows"):
        tiny.decoder(wide)
