"""Builds a ``CpuRunner`` from a model on disk: loads it, chooses how to cut attention, proves it.

``exact`` is proved on the loaded model before it serves (``baton/engine/cpu/selftest.py``).
"""

import logging
from collections.abc import Callable

import torch

from baton.control_groups import usable_cpus
from baton.engine.core.model_runner import ModelInfo, ModelRunner
from baton.engine.core.speculative.draft_proposer import DraftProposer
from baton.engine.core.speculative.proposers import Speculation
from baton.engine.cpu.attention import AttentionTiling
from baton.engine.cpu.cores import SharedCores, cores_file
from baton.engine.cpu.decoder import Decoder
from baton.engine.cpu.load import load_model
from baton.engine.cpu.lora import CpuAdapters
from baton.engine.cpu.native.library import choose_native, description, load, widens_bf16
from baton.engine.cpu.parallel.rank_processes import RankProcesses
from baton.engine.cpu.parallel.selftest import prepare_ranks
from baton.engine.cpu.parallel.shard import lead
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cpu.selftest import attention_tiling, numerics_id, verify_exact
from baton.engine.ipc import own_pool
from baton.engine.loading.memory import kv_geometry, pool_geometry
from baton.engine.loading.weights import Progress
from baton.engine.numerics import DTYPES, numerics_of
from baton.engine.sampling.grammars import Grammars
from baton.engine.settings import EngineSettings
from baton.model.artifact import ModelArtifact, ModelError, resolve_model
from baton.telemetry.process_memory import give_back
from baton.text.vocabulary_match import check_same_vocabulary
from baton.types.geometry import KvGeometry

_LOG = logging.getLogger(__name__)

_STAGES = {"probe": "probing", "convert": "converting", "read": "reading"}


def build_cpu_runner(
    settings: EngineSettings,
    artifact: ModelArtifact,
    map_pool: Callable[[KvGeometry], memoryview],
    progress: Callable[[str], None],
    grammars: Grammars,
    ranks: RankProcesses | None,
) -> tuple[CpuRunner, ModelInfo]:
    """Load a model, prove its numerics, and return its runner (``engine.build.build_artifact``)."""
    if ranks is not None and settings.weight_quantisation == "int4":
        raise ModelError("tensor_parallel does not support int4 weights; use int8 or none")
    choose_native(settings.native)
    progress("loading the kernels, which are compiled once per machine")
    cores = _shared_cores(settings)
    c = artifact.config
    dtype = settings.dtype
    numerics = numerics_of(settings.numerics)
    geometry = pool_geometry(settings, c, native=load() is not None, widened=widens_bf16())
    model, tiling = _load(settings, artifact, progress, ranks)
    progress(f"kernels: {description()}")
    if numerics == "exact":
        progress("checking that numerics are exact on this machine")
        verify_exact(model, tiling, dtype, settings.kv_dtype)
    adapters = CpuAdapters(c, DTYPES[dtype], numerics, settings.max_adapter_rank, model.shard)
    identity = numerics_id(model, tiling, dtype, numerics, settings.kv_dtype)
    runner = CpuRunner(
        model,
        map_pool(geometry if model.shard is None else model.shard.held(geometry)),
        geometry,
        tiling,
        c.eos_token_ids,
        adapters,
        grammars,
        shared_pool=True,
        cores=cores,
    )
    give_back()
    if cores is not None:
        cores.lend()
    context = settings.max_context_tokens
    return runner, ModelInfo(identity, artifact.weights_digest, context, c.vocab_size)


def _shared_cores(settings: EngineSettings) -> SharedCores | None:
    """Return this worker's entry in the table of shared cores; ranks lend and do not borrow."""
    if not settings.lends_cores:
        return None
    cores = usable_cpus()
    own = settings.threads * settings.tensor_parallel
    most = settings.threads if settings.tensor_parallel > 1 else cores
    try:
        return SharedCores(own, most, cores, cores_file())
    except OSError as error:  # any user of the host can create a file of this name
        _LOG.warning("cannot lend idle cores to other workers of this host: %s", error)
        return None


@torch.inference_mode()
def _load(
    settings: EngineSettings,
    artifact: ModelArtifact,
    progress: Callable[[str], None],
    ranks: RankProcesses | None,
) -> tuple[Decoder, AttentionTiling]:
    c = artifact.config
    dtype = settings.dtype
    numerics = numerics_of(settings.numerics)
    quantisation = settings.weight_quantisation
    shard = None if ranks is None else lead(c, ranks, own_pools=settings.own_pools)
    model = load_model(
        artifact,
        dtype,
        numerics,
        quantisation=quantisation,
        progress=_in_tenths(progress),
        shard=shard,
    )
    split = shard is not None
    tiling = attention_tiling(c, dtype, numerics, settings.kv_dtype, split=split)
    if shard is not None:
        progress(f"checking the split over {settings.tensor_parallel} ranks")
        prepare_ranks(shard, tiling, dtype, numerics, quantisation)
    return model, tiling


def _in_tenths(progress: Callable[[str], None]) -> Progress:
    """Return a report of loading that shows each stage in steps of 10 %."""
    shown = {"": 0}

    def report(stage: str, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if shown.get(stage) != tenth:
            shown[stage] = tenth
            progress(f"{_STAGES[stage]} weights: {10 * tenth} %")

    return report


def build_draft(
    settings: EngineSettings, main_runner: ModelRunner, progress: Callable[[str], None]
) -> Speculation:
    """Load the draft model that the settings name, beside the main one.

    Its KV pool has as many blocks as the main pool, of the draft model's size. It follows the same
    grammars, and has no adapters.

    Raises:
        ModelError: It cannot be loaded, or its vocabulary differs from the main model's.
        NumericsSetupError: ``exact`` is impossible for it on this machine.
    """
    progress(f"loading the draft model {settings.speculation.draft}")
    draft = resolve_model(settings.speculation.draft)
    main = resolve_model(settings.model)
    check_same_vocabulary(main, draft)
    numerics = numerics_of(settings.numerics)
    with torch.inference_mode():
        model = load_model(draft, settings.dtype, numerics)
        tiling = attention_tiling(draft.config, settings.dtype, numerics)
    geometry = kv_geometry(draft.config, settings.dtype, main_runner.geometry.num_blocks)
    pool = own_pool(geometry)
    grammars = main_runner.grammars if isinstance(main_runner, CpuRunner) else None
    stops = main.config.eos_token_ids
    runner = CpuRunner(model, pool, geometry, tiling, stops, grammars=grammars)
    return Speculation(DraftProposer(runner), settings.speculation.tokens)
