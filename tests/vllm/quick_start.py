"""Quicker starts of the vLLMs in `make test-vllm`: `environment` installs it as `sitecustomize`.

A vLLM spawns a core and a worker, and each imports vLLM for 6.5 CPU seconds. With this they are
forks, as in vLLM without its command line. Garbage is collected less often during the one import.
"""

import gc
import multiprocessing
import os
import sys
from multiprocessing.context import BaseContext

_context = multiprocessing.get_context


def _forking(method: str | None = None) -> BaseContext:
    """Return the context of a method, or of `fork` for what `VLLM_WORKER_MULTIPROC_METHOD` sets."""
    of_vllm = sys._getframe(1).f_code.co_name == "get_mp_context"
    return _context("fork" if of_vllm else method)


if os.environ.get("BATON_VLLM_FORKS"):
    gc.set_threshold(100_000, 20, 20)
    multiprocessing.get_context = _forking  # type: ignore[assignment]
