"""Builds a proven ``CudaRunner`` from a model on disk."""

import math
import os
from collections.abc import Callable

import msgspec
import torch

from baton.engine.core.model_runner import ModelInfo
from baton.engine.cuda.decoder import CudaDecoder, DecoderShape
from baton.engine.cuda.kernels.products import FP8_SIDE
from baton.engine.cuda.lora import CudaAdapters
from baton.engine.cuda.runner import CudaRunner
from baton.engine.cuda.selftest import (
    SELFTEST_BLOCKS,
    device_name,
    numerics_id,
    verify_exact,
    verify_steps,
)
from baton.engine.loading.memory import EngineShape, footprint, pool_geometry
from baton.engine.loading.open import load_weights
from baton.engine.models.families import FAMILIES
from baton.engine.models.rope import other_frequencies, rope_frequencies, rope_magnitude
from baton.engine.numerics import DTYPES
from baton.engine.sampling.grammars import Grammars
from baton.engine.settings import EngineSettings
from baton.model.artifact import ModelArtifact, ModelConfig, ModelError
from baton.types.geometry import KvGeometry

_FP8_CAPABILITY = (9, 0)
_MOST_ROWS = 1024
_USED_SHARE = 0.85  # of the device's free memory; the rest is for activations, splits and graphs


def shape_of(config: ModelConfig, max_context_tokens: int) -> DecoderShape:
    """Return the decoder's numbers for a model."""
    family = FAMILIES[config.family]
    return DecoderShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        max_context_tokens=max_context_tokens,
        windows=tuple(window or 0 for window in config.layer_windows),
        gelu=family.activation == "gelu_tanh",
        embed_scale=math.sqrt(config.hidden_size) if family.scale_embedding else 1.0,
        query_scale=config.query_scale,
    )


def make_decoder(
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    geometry: KvGeometry,
    device: torch.device,
    max_context_tokens: int,
    *,
    exact: bool,
    fp8: bool = False,
) -> CudaDecoder:
    """Make a decoder from the weights of ``loading.open.load_weights``, which are emptied.

    Raises:
        ModelError: The kernels do not support its shape, or weights are left over.
    """
    frequencies = rope_frequencies(config, weights.pop("rope_factors", None))
    ropes = [(frequencies, rope_magnitude(config))]
    if (other := other_frequencies(config)) is not None:
        ropes.append((other, 1.0))
    try:
        decoder = CudaDecoder(
            shape_of(config, max_context_tokens),
            weights,
            ropes,
            dtype=DTYPES[geometry.dtype],
            device=device,
            num_blocks=geometry.num_blocks,
            block_tokens=geometry.block_tokens,
            exact=exact,
            fp8=fp8,
        )
    except ValueError as error:
        raise ModelError(f"this model does not run on CUDA: {error}") from error
    if weights:
        raise ModelError(f"unused weights on CUDA: {', '.join(sorted(weights)[:4])}")
    return decoder


def fit_pool(
    geometry: KvGeometry, weight_bytes: int, free_bytes: int, *, chosen: bool
) -> KvGeometry:
    """Return the pool, or a smaller one that fits on the device beside the weights.

    Args:
        geometry: Pool of the size that the host's memory or the configuration allows.
        weight_bytes: Size of all weights.
        free_bytes: Free memory of the device, before anything is loaded.
        chosen: Whether the configuration sets the size; then it is not changed.

    Raises:
        ModelError: The pool does not fit; the message names the number of blocks that do.
    """
    most = int((free_bytes * _USED_SHARE - weight_bytes) / geometry.block_bytes)
    if geometry.num_blocks <= most:
        return geometry
    if chosen or most < SELFTEST_BLOCKS:
        raise ModelError(
            f"kv_blocks_per_worker is {geometry.num_blocks}, limit {max(most, 0)}: the GPU has "
            f"{free_bytes / 1e9:.1f} GB free and the weights need {weight_bytes / 1e9:.1f} GB"
        )
    return msgspec.structs.replace(geometry, num_blocks=most)


def build_cuda_runner(
    settings: EngineSettings,
    artifact: ModelArtifact,
    max_context_tokens: int,
    map_pool: Callable[[KvGeometry], memoryview],
    progress: Callable[[str], None],
    grammars: Grammars | None = None,
    device: torch.device | None = None,
) -> tuple[CudaRunner, ModelInfo]:
    """Load a model, prove its numerics, and return its runner (``engine.build.build_runner``)."""
    _refuse(settings, artifact)
    if device is None:
        device = _first_gpu()
    c = artifact.config
    geometry = pool_geometry(settings, c)
    if device.type == "cuda":
        need = footprint(EngineShape(c, settings.dtype, settings.weight_quantisation))
        free = torch.cuda.mem_get_info(device)[0]
        chosen = bool(settings.kv_blocks)
        if not chosen:  # all workers of a host start together, on the first GPU that they see
            free //= max(settings.workers_on_host, 1)
        geometry = fit_pool(geometry, need.weights, free, chosen=chosen)
    weights = load_weights(artifact, settings.dtype)
    exact = settings.numerics != "fast"
    progress(f"moving weights to {device_name(device)}")
    fp8 = settings.weight_quantisation == "fp8"
    decoder = make_decoder(c, weights, geometry, device, max_context_tokens, exact=exact, fp8=fp8)
    if exact:
        progress(f"checking that numerics are exact on {device_name(device)}")
        verify_exact(decoder)
    identity = numerics_id(decoder, settings.dtype)
    adapters = CudaAdapters(c, decoder, settings.max_adapter_rank)
    runner = CudaRunner(decoder, map_pool(geometry), geometry, c.eos_token_ids, adapters, grammars)
    verify_steps(decoder, runner.steps)
    runner.host_pool.verify()
    runner.steps.prepare(settings.max_batch_requests, progress)
    return runner, ModelInfo(identity, artifact.weights_digest, max_context_tokens, c.vocab_size)


def _first_gpu() -> torch.device:
    if not torch.cuda.is_available():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        limit = "" if seen is None else f" with CUDA_VISIBLE_DEVICES={seen}"
        raise ModelError(
            f"device is cuda, but torch {torch.__version__} sees no GPU{limit}; use device cpu, or "
            "a torch built for CUDA on a machine with an NVIDIA driver"
        )
    return torch.device("cuda")


def _refuse(settings: EngineSettings, artifact: ModelArtifact) -> None:
    escape = "use device cpu; with auto, hide the GPU by CUDA_VISIBLE_DEVICES="
    c = artifact.config
    if c.num_experts or not all(c.rope_layers):
        part = "a mixture of experts" if c.num_experts else "with layers without RoPE"
        raise ModelError(
            f"{artifact.source}: architecture {artifact.architecture}, {part}, is "
            f"not supported on CUDA; {escape}"
        )
    quantisation = settings.weight_quantisation
    if quantisation not in ("none", "fp8"):
        raise ModelError(
            f"quantisation.weights {quantisation} is not supported on CUDA; use fp8 or {escape}"
        )
    if quantisation == "fp8":
        _refuse_fp8(settings, artifact.config)
    if settings.max_batch_requests > _MOST_ROWS:
        raise ModelError(
            f"max_batch_requests is {settings.max_batch_requests}, limit on CUDA {_MOST_ROWS}"
        )
    if settings.speculation.mode == "draft":
        raise ModelError(f"a draft model is not supported on CUDA, use ngram; {escape}")
    for name, is_set in (
        ("kv_dtype", bool(settings.kv_dtype)),
        ("tensor_parallel", settings.tensor_parallel != 1),
        ("emulated_token_s", bool(settings.emulated_token_s)),
        ("emulated_nan_after_steps", bool(settings.emulated_nan_after_steps)),
    ):
        if is_set:
            raise ModelError(f"{name} is not supported on CUDA; {escape}")


def _refuse_fp8(settings: EngineSettings, c: ModelConfig) -> None:
    if settings.dtype != "bf16":
        raise ModelError(
            f"quantisation.weights fp8 does not support dtype {settings.dtype}; use bf16"
        )
    heads = c.num_heads * c.head_dim
    for width in (c.hidden_size, c.intermediate_size, heads, c.num_kv_heads * c.head_dim):
        if width % FP8_SIDE:
            raise ModelError(
                f"quantisation.weights fp8: width {width} is not a multiple of {FP8_SIDE}"
            )
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        raise ModelError("quantisation.weights fp8 needs compute capability 9.0 (Hopper)")
