"""Construction of an engine from settings: runner, core, tiers and other ranks."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from baton.engine.core.core import EngineCore
from baton.engine.core.model_runner import ModelInfo, ModelRunner
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.speculative.proposers import NgramProposer, Speculation
from baton.engine.core.tiers.places import TierPlaces
from baton.engine.cpu.parallel.rank_processes import RankProcesses
from baton.engine.ipc import map_pool
from baton.engine.process.tier_copier import BlockMover, TierCopier
from baton.engine.process.tier_shelves import DiskShelf, MemoryShelf, Shelf, ShelfError
from baton.engine.settings import EmulatedModel, EngineSettings, KvTierSettings
from baton.model.artifact import ModelError
from baton.types.geometry import KvGeometry

EMULATED = "emulated"

Progress = Callable[[str], None]


class BuiltEngine(NamedTuple):
    """Parts that a step loop drives."""

    core: EngineCore
    runner: ModelRunner
    info: ModelInfo
    ranks: RankProcesses | None
    copier: TierCopier | None = None


def build_engine(
    settings: EngineSettings, pool_fd: int, progress: Progress, own_fds: Sequence[int] = ()
) -> BuiltEngine:
    """Load the model and build the engine.

    Raises:
        ModelError: The model cannot be loaded.
        RankError: A rank died or hangs.
        NumericsSetupError: This machine cannot keep ``exact``.
    """
    if settings.own_pools and settings.kv_tiers.names:
        raise ModelError("kv_tiers cannot be combined with rank_memory: own (one pool per rank)")
    ranks = None
    if settings.emulated is not None:
        runner, info = _build_paced(settings, settings.emulated, pool_fd)
    elif settings.model == EMULATED:
        runner, info = build_emulated(settings, pool_fd)
    else:
        from baton.engine.build import build_runner  # imports torch

        if settings.tensor_parallel > 1:
            ranks = RankProcesses(settings, pool_fd, own_fds)
        runner, info = build_runner(
            settings, lambda geometry: map_pool(pool_fd, geometry), progress, ranks
        )
    tiers, shelves = open_tiers(settings, runner.geometry, info, progress)
    copier = None
    if shelves:
        pool = map_pool(pool_fd, runner.geometry)
        disk = shelves.get("disk")
        others = disk.others if isinstance(disk, DiskShelf) else None
        copier = TierCopier(BlockMover(pool, runner.geometry, shelves), others)
    core = EngineCore(
        runner,
        SchedulerConfig(settings.max_batch_requests, settings.max_step_tokens),
        speculation=_speculation(settings, runner, progress),
        tiers=tiers,
        check_every_step=settings.check_every_step,
    )
    return BuiltEngine(core, runner, info, ranks, copier)


def open_tiers(
    settings: EngineSettings, geometry: KvGeometry, info: ModelInfo, progress: Progress
) -> tuple[list[TierPlaces], dict[str, Shelf]]:
    """Return the configured tiers that can be opened, the fastest first, and their shelves.

    An unusable folder disables only the disk tier.
    """
    configured = settings.kv_tiers
    block_bytes = geometry.block_bytes
    tiers: list[TierPlaces] = []
    shelves: dict[str, Shelf] = {}
    if places := (configured.memory_mb << 20) // block_bytes:
        tiers.append(TierPlaces("memory", places))
        shelves["memory"] = MemoryShelf(places, block_bytes)
    if places := (configured.disk_mb << 20) // block_bytes:
        try:
            folder = Path(configured.disk_folder)
            key = _format_key(geometry, info, configured)
            disk = DiskShelf(folder, key, places, block_bytes, shared=configured.disk_shared)
        except ShelfError as error:
            progress(f"disk KV tier disabled: {error}")
        else:
            tiers.append(TierPlaces("disk", places, disk.found))
            shelves["disk"] = disk
    for tier in tiers:
        progress(f"KV tier {tier.name}: {tier.places} blocks of {block_bytes} bytes")
    return tiers, shelves


def _format_key(geometry: KvGeometry, info: ModelInfo, tiers: KvTierSettings) -> str:
    """Return a key that is equal for engines with exchangeable blocks."""
    layout = msgspec.json.encode(msgspec.structs.replace(geometry, num_blocks=0))
    parts = [info.weights_digest, info.numerics_id.encode(), layout, tiers.int8_chunks]
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).hexdigest()


def _speculation(
    settings: EngineSettings, main: ModelRunner, progress: Progress
) -> Speculation | None:
    mode = settings.speculation.mode
    if mode == "off":
        return None
    if mode == "ngram":
        return Speculation(NgramProposer(), settings.speculation.tokens)
    from baton.engine.cpu.build import build_draft

    return build_draft(settings, main, progress)


def _build_paced(
    settings: EngineSettings, model: EmulatedModel, pool_fd: int
) -> tuple[ModelRunner, ModelInfo]:
    from baton.engine.emulated_timing import numerics_id_of
    from baton.engine.paced import PacedRunner, paced_geometry

    geometry = paced_geometry(settings.kv_blocks)
    runner = PacedRunner(geometry, map_pool(pool_fd, geometry), model)
    weights = hashlib.blake2b(f"emulated {settings.model}".encode(), digest_size=16).digest()
    context = model.max_context_tokens
    info = ModelInfo(numerics_id_of(model.timing), weights, context, model.vocab_size)
    return runner, info


def build_emulated(settings: EngineSettings, pool_fd: int) -> tuple[ModelRunner, ModelInfo]:
    """Build the emulated engine of protocol tests, without torch."""
    from baton.engine.emulated import EmulatedRunner

    geometry = KvGeometry(
        num_layers=4,
        num_kv_heads=2,
        head_dim=8,
        num_blocks=settings.kv_blocks or 1024,
        dtype=settings.kv_dtype or "bf16",
    )
    runner = EmulatedRunner(
        geometry,
        map_pool(pool_fd, geometry),
        token_s=settings.emulated_token_s,
        nan_after_steps=settings.emulated_nan_after_steps,
    )
    return runner, ModelInfo("exact/emulated", b"emulated weights", 1 << 20, 1 << 20)
