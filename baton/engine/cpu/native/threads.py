"""Number of threads for the native kernels."""

import torch

from baton.engine.cpu.native.library import load


def job_threads() -> int:
    """Return torch's threads, or more if idle cores are borrowed (``engine/cpu/cores.py``)."""
    library = load()
    own = torch.get_num_threads()
    return own if library is None else int(library.baton_threads(own))
