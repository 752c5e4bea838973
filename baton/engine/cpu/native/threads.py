"""How many threads the native kernels are cut for."""

import torch

from baton.engine.cpu.native.library import load


def job_threads() -> int:
    """Torch's threads, or more where idle cores are borrowed (``baton/engine/cpu/cores.py``)."""
    library = load()
    own = torch.get_num_threads()
    return own if library is None else int(library.baton_threads(own))
