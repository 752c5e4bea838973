"""Build a model runner from settings: check the model's limits and choose the CPU or CUDA backend.

``baton/engine/cpu/build.py`` and ``baton/engine/cuda/build.py`` load, verify and wrap the model.
They do not depend on each other.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch

from baton.engine.core.model_runner import ModelInfo, ModelRunner
from baton.engine.sampling.grammars import open_grammars
from baton.engine.settings import EngineSettings
from baton.model.artifact import ModelArtifact, ModelError, resolve_model
from baton.types.geometry import KvGeometry

if TYPE_CHECKING:
    from baton.engine.cpu.parallel.rank_processes import RankProcesses


def build_runner(
    settings: EngineSettings,
    map_pool: Callable[[KvGeometry], memoryview],
    progress: Callable[[str], None],
    ranks: "RankProcesses | None" = None,
) -> tuple[ModelRunner, ModelInfo]:
    """Find the model of ``settings`` and build its runner: see ``build_artifact``."""
    progress(f"resolving {settings.model}")
    return build_artifact(resolve_model(settings.model), settings, map_pool, progress, ranks)


def build_artifact(
    artifact: ModelArtifact,
    settings: EngineSettings,
    map_pool: Callable[[KvGeometry], memoryview],
    progress: Callable[[str], None],
    ranks: "RankProcesses | None" = None,
) -> tuple[ModelRunner, ModelInfo]:
    """Load a model and build its runner.

    ``map_pool`` returns zeroed memory for the KV pool; ``ranks`` are the other ranks of a
    tensor-parallel replica on CPU.

    Raises:
        ModelError: The model or a setting is not supported on the device, or there is no GPU.
        NumericsSetupError: The device cannot keep ``exact``.
    """
    torch.set_num_threads(settings.threads)
    context = settings.max_context_tokens or artifact.config.max_context_tokens
    if context > artifact.config.max_context_tokens:
        raise ModelError(
            f"max_context_tokens is {context}; {settings.model} supports at most "
            f"{artifact.config.max_context_tokens}"
        )
    settings = msgspec.structs.replace(settings, max_context_tokens=context)
    is_on_cuda = _is_on_cuda(settings.device)
    grammars = open_grammars(artifact)  # reads the vocabulary while the weights load
    if is_on_cuda:
        try:
            from baton.engine.cuda.build import build_cuda_runner
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ModelError("device cuda needs triton; install it or use cpu") from error
        return build_cuda_runner(settings, artifact, context, map_pool, progress, grammars)
    from baton.engine.cpu.build import build_cpu_runner

    return build_cpu_runner(settings, artifact, map_pool, progress, grammars, ranks)


def _is_on_cuda(device: str) -> bool:
    if device not in ("cpu", "cuda", "auto"):
        raise ModelError(f"device (BATON_DEVICE) is {device!r}; use cpu, cuda or auto")
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())
