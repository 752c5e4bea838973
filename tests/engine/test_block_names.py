"""Names of blocks: the bytes of hashlib's in C++."""

import random

import numpy as np
import pytest

from baton.engine import block_names
from baton.types.block_hashes import block_hashes


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 32, 100, 5000])
def test_names_are_the_hashes_of_python(tokens, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(block_names, "load", lambda: None)
    elif block_names.load() is None:
        pytest.skip("no compiler")
    draw = random.Random(tokens)
    for _ in range(20):
        prompt, seed = [draw.randrange(2**32) for _ in range(tokens)], draw.randbytes(16)
        packed = np.asarray(prompt, dtype="<u4").tobytes()
        names = block_names.block_names(seed, prompt)
        assert names == block_hashes(seed, prompt) == block_names.block_names(seed, packed)
        assert block_names.packed_names(seed, packed) == b"".join(names)
