"""From a model on disk to a proven ``CudaRunner``."""

# ruff: noqa: N806 - suffixes such as x_TE give shapes

import math
from collections.abc import Callable
from itertools import pairwise

import torch

from engine.core.geometry import BLOCK_TOKENS, KvGeometry
from engine.cuda import CudaDecoder, DecoderShape
from engine.cuda_adapters import CudaAdapters
from engine.cuda_runner import CudaRunner
from engine.cuda_steps import DecodeRow, DecodeSteps
from engine.grammars import Grammars
from engine.ipc import EngineSettings
from engine.kernels.attention import Span
from engine.kernels.configs import SPLIT_TOKENS
from engine.kernels.products import FP8_SIDE
from engine.loading import load_weights
from engine.models.families import FAMILIES
from engine.models.rope import ROPE_ORDER, local_frequencies, rope_frequencies, rope_magnitude
from engine.numerics import DTYPES, NumericsSetupError, digest, same_bits
from engine.process import ModelInfo
from engine.text.artifact import ModelArtifact, ModelConfig, ModelError

_PROBE_TOKENS = 2 * SPLIT_TOKENS + 5 * BLOCK_TOKENS + 3  # three splits, the last page not full
_SETTINGS = (
    "model",
    "dtype",
    "numerics",
    "device",
    "kv_blocks",
    "threads",
    "max_context_tokens",
    "max_batch_requests",
    "max_step_tokens",
    "poison_token",
    "workers_on_host",
    "check_every_step",
    "max_adapters",
    "max_adapter_rank",
    "speculation",
    "weight_quantisation",
)
_FP8_CAPABILITY = (9, 0)
_STEP_TOKENS = 2 * BLOCK_TOKENS + 3
_NEAR = 0.05
_BESIDE = 10  # tokens of another sequence in the same step: enough to be a prefill


def shape_of(config: ModelConfig, max_context_tokens: int) -> DecoderShape:
    """The decoder's numbers for a model."""
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
    """A decoder from loaded weights (``engine.loading.load_weights``), which are emptied.

    Raises:
        ModelError: The kernels cannot take its shape, or weights are left over.
    """
    frequencies = rope_frequencies(config, weights.pop("rope_factors", None))
    ropes = [(frequencies, rope_magnitude(config))]
    if (local := local_frequencies(config)) is not None:
        ropes.append((local, 1.0))
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
        raise ModelError(f"CUDA has no use for the weights {', '.join(sorted(weights)[:4])}")
    return decoder


def verify_exact(decoder: CudaDecoder) -> None:
    """Prove ``exact`` on the loaded model: same bits in one chunk, in odd chunks, and in a batch.

    Uses the first blocks of the pool, and leaves them zero.

    Raises:
        NumericsSetupError: The message names the positions that differ.
        ModelError: The pool is too small for the proof.
    """
    length = min(_PROBE_TOKENS, decoder.shape.max_context_tokens)
    tokens = [(7919 * i + 13) % decoder.shape.vocab_size for i in range(length)]
    blocks = -(-length // decoder.block_tokens)
    if decoder.pool.shape[2] < 2 * blocks:
        raise ModelError(f"kv_blocks is {decoder.pool.shape[2]}; the proof needs {2 * blocks}")
    tables = [list(range(blocks)), list(range(2 * blocks - 1, blocks - 1, -1))]

    def run(*parts: tuple[int, int, int]) -> list[torch.Tensor]:
        """``(table, start, end)`` together in one step."""
        flat: list[int] = []
        spans = []
        for number, (_, start, end) in enumerate(parts):
            spans.append(Span(len(flat), start, end - start, number))
            flat += tokens[start:end]
        x_TE = decoder.forward(decoder.batch(flat, spans, [tables[t] for t, _, _ in parts]))
        return [x_TE[s.row : s.row + s.count] for s in spans]

    whole = run((0, 0, length))[0].clone()
    cuts = [0, length // 2 - 3, length - 8, length - 7, length - 2, length - 1, length]
    for start, end in pairwise(cuts):
        # beside it, in the same step, the other sequence computes something else
        got = run((1, start, end), (0, 0, min(end, _BESIDE)))[0]
        if not same_bits(got, whole[start:end]):
            raise NumericsSetupError(
                f"numerics exact: positions {start} to {end - 1} computed apart differ from one "
                f"chunk on {_name(decoder.device)}; use numerics: fast"
            )
    decoder.pool[:, :, : 2 * blocks].zero_()


@torch.inference_mode()
def verify_steps(decoder: CudaDecoder, steps: DecodeSteps) -> None:
    """Prove that a captured step, padded to its bucket, computes what single launches compute.

    Uses the first blocks of the pool, and leaves them zero.

    Raises:
        NumericsSetupError: It does not.
    """
    length, size = min(_STEP_TOKENS, decoder.shape.max_context_tokens), decoder.block_tokens
    tokens = [(7919 * i + 13) % decoder.shape.vocab_size for i in range(length)]
    blocks = -(-length // size)
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(3)]
    ends = [length - 1, length // 2, 1]
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
        raise NumericsSetupError(
            f"a decode step in one piece differs from single launches on {_name(decoder.device)}"
        )
    decoder.pool[:, :, : 3 * blocks].zero_()


def _near(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two results are equal up to the rounding of bf16."""
    return bool((left - right).norm() <= _NEAR * right.norm())


def numerics_id(decoder: CudaDecoder, dtype: str) -> str:
    """What two workers must have in common for their KV and tokens to be interchangeable."""
    length = min(_PROBE_TOKENS, decoder.shape.max_context_tokens)
    tokens = [(104729 * i + 5) % decoder.shape.vocab_size for i in range(length)]
    blocks = list(range(-(-length // decoder.block_tokens)))
    x_TE = decoder.forward(decoder.batch(tokens, [Span(0, 0, length, 0)], [blocks]))
    logits_SV = decoder.logits(x_TE[-1:].contiguous())
    decoder.pool[:, :, blocks].zero_()
    mode = "exact" if decoder.exact else "fast"
    cut = f"m{decoder.decode_config.block_m}k{decoder.decode_config.kv_tile}"
    cut += f"s{decoder.decode_config.split}"
    bits = digest((x_TE.cpu(), logits_SV.cpu()))
    kinds = f"{dtype}/fp8" if decoder.fp8 else dtype
    return f"{mode}/{kinds}/{ROPE_ORDER}/cuda-{cut}/{bits}"


def open_cuda_runner(
    settings: EngineSettings,
    artifact: ModelArtifact,
    max_context_tokens: int,
    map_pool: Callable[[KvGeometry], memoryview],
    progress: Callable[[str], None],
    grammars: Grammars | None = None,
    device: torch.device | None = None,
) -> tuple[CudaRunner, ModelInfo]:
    """Load, prove, and wrap (see ``engine.opening.open_runner``).

    Args:
        settings: Dtype, numerics and number of blocks.
        artifact: The model.
        max_context_tokens: Longest sequence.
        map_pool: Gives the memory of the pool that others see, zeroed.
        progress: Called with one line of text at a time.
        grammars: For requests with a grammar.
        device: By default ``cuda``.

    Raises:
        ModelError: The model cannot be loaded.
        NumericsSetupError: ``exact`` cannot be kept on this device.
    """
    _refuse(settings, artifact)
    device = device or torch.device("cuda")
    c = artifact.config
    geometry = KvGeometry(
        num_layers=c.num_layers,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        num_blocks=settings.kv_blocks,
        dtype=settings.dtype,
    )
    weights = load_weights(artifact, settings.dtype)
    exact = settings.numerics != "fast"
    progress(f"moving weights to {_name(device)}")
    fp8 = settings.weight_quantisation == "fp8"
    decoder = make_decoder(c, weights, geometry, device, max_context_tokens, exact=exact, fp8=fp8)
    if exact:
        progress(f"checking that numerics are exact on {_name(device)}")
        verify_exact(decoder)
    identity = numerics_id(decoder, settings.dtype)
    adapters = CudaAdapters(c, decoder, settings.max_adapter_rank)
    runner = CudaRunner(decoder, map_pool(geometry), geometry, c.eos_token_ids, adapters, grammars)
    verify_steps(decoder, runner.steps)
    return runner, ModelInfo(identity, artifact.weights_digest, max_context_tokens)


def _refuse(settings: EngineSettings, artifact: ModelArtifact) -> None:
    """Name what the CUDA path does not have; a setting that it does not know is one of them."""
    escape = "hide the GPU with CUDA_VISIBLE_DEVICES= to serve on the CPU"
    if artifact.config.num_experts:
        raise ModelError(
            f"{artifact.source}: architecture {artifact.architecture}, a mixture of experts, does "
            f"not run on CUDA yet; {escape}"
        )
    kept = settings.weight_quantisation
    if kept not in ("none", "fp8"):
        raise ModelError(
            f"quantisation.weights {kept} is not supported on CUDA, only fp8; {escape}"
        )
    if kept == "fp8":
        _refuse_fp8(settings, artifact.config)
    if settings.speculation.mode == "draft":
        raise ModelError(f"a draft model is not supported on CUDA yet, only ngram; {escape}")
    plain = EngineSettings(model=settings.model)
    for name in EngineSettings.__struct_fields__:
        if name not in _SETTINGS and getattr(settings, name) != getattr(plain, name):
            raise ModelError(f"{name} is not supported on CUDA yet; {escape}")


def _refuse_fp8(settings: EngineSettings, c: ModelConfig) -> None:
    """Name what fp8 weights need and this start does not have."""
    if settings.dtype != "bf16":
        raise ModelError(f"quantisation.weights fp8 needs dtype bf16, not {settings.dtype}")
    heads = c.num_heads * c.head_dim
    for width in (c.hidden_size, c.intermediate_size, heads, c.num_kv_heads * c.head_dim):
        if width % FP8_SIDE:
            raise ModelError(
                f"quantisation.weights fp8: a width of {width} is not a multiple of {FP8_SIDE}"
            )
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        raise ModelError("quantisation.weights fp8 needs compute capability 9.0 (Hopper)")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the interpreter"
