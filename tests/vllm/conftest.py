"""Environment of the vLLMs that these tests start."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def without_compilation() -> Iterator[None]:
    """Do not let each vLLM compile its sampler at the first request with log-probabilities.

    On CPUs that takes 3.3 s of CPU time, and more with an empty cache of compiled code.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield
