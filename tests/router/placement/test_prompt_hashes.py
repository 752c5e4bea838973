"""Names of a prompt's blocks in C++: the bytes of hashlib's."""

import random

import pytest

from baton.types.block_hashes import block_hashes
from router.routing.placement.native.library import load
from router.routing.placement.prompt_hashes import native_hashes

pytestmark = pytest.mark.skipif(load() is None, reason="no compiler")


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 32, 100, 5000])
def test_native_names_are_those_of_the_engine(tokens):
    draw = random.Random(tokens)
    for _ in range(20):
        prompt, seed = [draw.randrange(2**32) for _ in range(tokens)], draw.randbytes(16)
        assert native_hashes(load(), seed, prompt) == b"".join(block_hashes(seed, prompt))
