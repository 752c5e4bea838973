"""Loads a draft model: a small model of the same vocabulary, with its own KV pool."""

from collections.abc import Callable

import torch

from baton.engine.core.model_runner import ModelRunner
from baton.engine.core.speculative.draft_proposer import DraftProposer
from baton.engine.core.speculative.proposers import Speculation
from baton.engine.cpu.load import load_model
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cpu.selftest import attention_tiling
from baton.engine.ipc import own_pool
from baton.engine.loading.memory import kv_geometry
from baton.engine.numerics import numerics_of
from baton.engine.settings import EngineSettings
from baton.model.artifact import resolve_model
from baton.text.vocabulary_match import check_same_vocabulary


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
