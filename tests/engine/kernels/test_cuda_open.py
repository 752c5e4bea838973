"""From settings to a runner on CUDA, and what is refused there by name."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine import cuda_open, opening
from engine.core.geometry import KvGeometry
from engine.core.params import SamplingParams
from engine.ipc import EngineSettings
from engine.text.artifact import ModelError
from tests.engine.kernels import tiny

SHALLOW = tiny.config(layers=1)
SETTINGS = EngineSettings(model="tiny", dtype="fp32", kv_blocks=8, device="cuda")


@pytest.fixture
def artifact(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cuda_open, "load_weights", lambda _, dtype: tiny.weights(SHALLOW, dtype))
    found = SimpleNamespace(
        source="tiny", architecture="llama", config=SHALLOW, weights_digest=b"digest"
    )
    monkeypatch.setattr(opening, "resolve_model", lambda _: found)
    return found


def memory(geometry: KvGeometry) -> memoryview:
    return memoryview(bytearray(geometry.pool_bytes))


def test_a_model_is_loaded_proven_and_wrapped(artifact: Any) -> None:
    said: list[str] = []
    made, info = cuda_open.open_cuda_runner(SETTINGS, artifact, 36, memory, said.append, tiny.CPU)
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
    monkeypatch.setattr(cuda_open, "open_cuda_runner", lambda *_: marker)
    monkeypatch.setattr(opening, "load_model", on_the_cpu)
    monkeypatch.setattr(opening.torch.cuda, "is_available", lambda: has_gpu)
    settings = msgspec.structs.replace(SETTINGS, device=device)
    if cuda:
        assert opening.open_runner(settings, memory, print) is marker
    else:
        with pytest.raises(OnTheCpuError):
            opening.open_runner(settings, memory, print)


def test_other_architectures_and_settings_are_refused_by_name(artifact: Any) -> None:
    artifact.architecture = "Gemma3ForCausalLM"
    with pytest.raises(ModelError, match=r"Gemma3ForCausalLM does not run on CUDA.*hide the GPU"):
        cuda_open.open_cuda_runner(SETTINGS, artifact, 36, memory, print, tiny.CPU)
    artifact.architecture = "llama"
    strange = msgspec.structs.replace(SETTINGS, emulated_token_s=1.0)
    with pytest.raises(ModelError, match="emulated_token_s is not supported on CUDA yet"):
        cuda_open.open_cuda_runner(strange, artifact, 36, memory, print, tiny.CPU)


def test_weights_that_would_be_ignored_are_refused() -> None:
    weights = tiny.weights(SHALLOW, "fp32") | {"layers.0.q_bias": tiny.torch.zeros(48)}
    geometry = tiny.geometry(SHALLOW, "fp32")
    with pytest.raises(ModelError, match=r"no use for the weights layers\.0\.q_bias"):
        cuda_open.make_decoder(SHALLOW, weights, geometry, tiny.CPU, 36, exact=True)
