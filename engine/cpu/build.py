"""From a model on disk to a proven ``CpuRunner``: load, choose how attention is cut, prove, name.

``exact`` is proved on the loaded model before anybody is served, and the numerics id is a digest of
computed bits, so two workers that say the same id can hand over to each other.
"""

from collections.abc import Callable

import torch

from engine.artifacts.artifact import ModelArtifact, ModelError, resolve_model
from engine.core.geometry import BLOCK_TOKENS, KvGeometry
from engine.core.model_runner import ModelInfo, ModelRunner
from engine.core.plan import PlanRow, StepPlan
from engine.cpu import selftest
from engine.cpu.attention import AttentionTiling
from engine.cpu.decoder import Decoder
from engine.cpu.load import load_model
from engine.cpu.lora import LoadedAdapters
from engine.cpu.native.library import load
from engine.cpu.parallel.rank_processes import RankProcesses
from engine.cpu.parallel.selftest import prepare_ranks
from engine.cpu.parallel.shard import lead
from engine.cpu.runner import CpuRunner
from engine.loading.memory import give_back_memory, kv_geometry, pool_geometry
from engine.models.rope import ROPE_ORDER
from engine.numerics import DTYPES, Numerics, NumericsSetupError, digest, same_bits
from engine.sampling.grammars import Grammars
from engine.settings import EngineSettings
from engine.text.grammar import vocabulary_of
from engine.text.tokenizer import load_tokenizer


def geometry_of(artifact: ModelArtifact, kv_dtype: str, num_blocks: int) -> KvGeometry:
    """The pool's shape for a model."""
    return kv_geometry(artifact.config, kv_dtype, num_blocks)


def attention_tiling(artifact: ModelArtifact, dtype: str, numerics: Numerics) -> AttentionTiling:
    """How attention is cut on this machine.

    Raises:
        NumericsSetupError: ``exact`` cannot be kept.
    """
    c = artifact.config
    if numerics == "fast":
        return selftest.fast_tiling(c.num_heads // c.num_kv_heads)
    return selftest.choose_tiling(c.num_heads, c.num_kv_heads, c.head_dim, dtype, c.window)


def open_grammars(artifact: ModelArtifact) -> Grammars:
    """Grammars over a model's vocabulary, which a thread begins to read."""
    c = artifact.config
    return Grammars(
        lambda: vocabulary_of(
            load_tokenizer(artifact.tokenizer_source()), c.vocab_size, c.eos_token_ids
        ),
        c.vocab_size,
    )


@torch.inference_mode()
def verify_exact(model: Decoder, tiling: AttentionTiling, dtype: str, kv_dtype: str = "") -> None:
    """Prove ``exact`` on the loaded model: same bits alone, in odd chunks, and in a batch.

    Raises:
        NumericsSetupError: The message names what differs.
    """
    for linear in model.linears().values():
        linear.check()
    c = model.config
    if fault := selftest.attention_fault(
        tiling, c.num_heads, c.num_kv_heads, c.head_dim, dtype, c.window
    ):
        raise NumericsSetupError(f"numerics exact: attention differs in {fault}")
    geometry = KvGeometry(
        num_layers=c.num_layers,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        num_blocks=24,
        dtype=kv_dtype or dtype,
    )
    runner = CpuRunner(model, bytearray(geometry.pool_bytes), geometry, tiling)
    length = 5 * BLOCK_TOKENS + 3
    tokens = [(7919 * i + 13) % c.vocab_size for i in range(length)]
    tables = [list(range(6)), [6 + (5 * i) % 6 for i in range(6)], list(range(12, 18))]

    def part(table: list[int], start: int, end: int) -> PlanRow:
        return PlanRow(table[0], tokens[start:end], start, table[: -(-end // BLOCK_TOKENS)])

    whole = runner.hidden(StepPlan((part(tables[0], 0, length),)))[0]
    steps = [
        [part(tables[1], 0, 37), part(tables[2], 0, 64)],
        [part(tables[1], 37, 66), part(tables[2], 64, 65)],
        [part(tables[1], 66, 67), part(tables[2], 65, 66)],
        [part(tables[1], 67, 70), part(tables[2], 66, length)],
        [part(tables[1], 70, 71)],
    ]
    for rows in steps:
        for row, got in zip(rows, runner.hidden(StepPlan(tuple(rows))), strict=True):
            end = row.start + len(row.tokens)
            if not same_bits(got, whole[row.start : end]):
                raise NumericsSetupError(
                    f"numerics exact: positions {row.start} to {end - 1} computed apart differ "
                    f"from one chunk with {torch.get_num_threads()} threads; use numerics: fast"
                )


@torch.inference_mode()
def numerics_id(
    model: Decoder, tiling: AttentionTiling, dtype: str, numerics: Numerics, kv_dtype: str = ""
) -> str:
    """What two workers must have in common for their KV and tokens to be interchangeable.

    It holds a digest of computed bits, so whatever the kernels depend on (CPU features, library
    versions, number of threads) is in it exactly as far as it matters.
    """
    c = model.config
    geometry = KvGeometry(
        num_layers=c.num_layers,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        num_blocks=24,
        dtype=kv_dtype or dtype,
    )
    runner = CpuRunner(model, bytearray(geometry.pool_bytes), geometry, tiling)
    tokens = [(104729 * i + 5) % c.vocab_size for i in range(300)]
    blocks = list(range(19))
    hidden = runner.hidden(StepPlan((PlanRow(0, tokens, 0, blocks),)))[0]
    logits = model.logits(hidden[-1:]).raw_SV
    cut = f"u{tiling.unit}t{tiling.tile}"
    kinds = "/".join(part for part in (dtype, model.quantisation, kv_dtype) if part)
    return f"{numerics}/{kinds}/{ROPE_ORDER}/{cut}/{digest((hidden, logits))}"


def open_runner(
    settings: EngineSettings,
    map_pool: Callable[[KvGeometry], memoryview],
    progress: Callable[[str], None],
    ranks: RankProcesses | None = None,
) -> tuple[ModelRunner, ModelInfo]:
    """Everything that an engine process needs: load, prove, and wrap.

    Args:
        settings: The model's reference, dtype, numerics, number of blocks and threads.
        map_pool: Gives the pool's memory, zeroed.
        progress: Called with one line of text at a time.
        ranks: The other ranks of a tensor-parallel replica.

    Raises:
        ModelError: The model cannot be loaded.
        RankError: A rank died or hangs.
        NumericsSetupError: ``exact`` cannot be kept on this machine.
    """
    torch.set_num_threads(settings.threads)
    numerics: Numerics = "fast" if settings.numerics == "fast" else "exact"
    progress(f"looking for {settings.model}")
    artifact = resolve_model(settings.model)
    context = settings.max_context_tokens or artifact.config.max_context_tokens
    if context > artifact.config.max_context_tokens:
        raise ModelError(
            f"max_context_tokens is {context}, but {settings.model} was made for "
            f"{artifact.config.max_context_tokens}"
        )
    geometry = pool_geometry(settings, artifact.config, native=load() is not None)
    grammars = open_grammars(artifact)  # reads the vocabulary while the weights load
    shown = {"": 0}

    def report(stage: str, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if shown.get(stage) != tenth:
            shown[stage] = tenth
            progress(f"{stage} weights: {10 * tenth} %")

    if ranks is not None and settings.weight_quantisation == "int4":
        raise ModelError("tensor_parallel: int4 weights are not split over ranks; int8 ones are")
    if settings.device not in ("cpu", "cuda", "auto"):
        raise ModelError(f"BATON_DEVICE = {settings.device!r}: must be cpu, cuda or auto")
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        from engine.cuda.build import open_cuda_runner  # needs triton

        return open_cuda_runner(settings, artifact, context, map_pool, progress, grammars)
    with torch.inference_mode():
        shard = None if ranks is None else lead(artifact.config, ranks)
        model = load_model(
            artifact,
            settings.dtype,
            numerics,
            quantisation=settings.weight_quantisation,
            progress=report,
            shard=shard,
        )
        tiling = attention_tiling(artifact, settings.dtype, numerics)
        if shard is not None:
            progress(f"checking the split over {settings.tensor_parallel} ranks")
            prepare_ranks(shard, tiling, settings.dtype, numerics, settings.weight_quantisation)
    if numerics == "exact":
        progress("checking that numerics are exact on this machine")
        verify_exact(model, tiling, settings.dtype, settings.kv_dtype)
    adapters = LoadedAdapters(
        artifact.config, DTYPES[settings.dtype], numerics, settings.max_adapter_rank, shard
    )
    identity = numerics_id(model, tiling, settings.dtype, numerics, settings.kv_dtype)
    stops = artifact.config.eos_token_ids
    runner = CpuRunner(
        model, map_pool(geometry), geometry, tiling, stops, adapters, grammars, shared_pool=True
    )
    give_back_memory()
    return runner, ModelInfo(identity, artifact.weights_digest, context)
