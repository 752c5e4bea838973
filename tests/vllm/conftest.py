"""Environment of the vLLMs that these tests start."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def with_quick_starts() -> Iterator[None]:
    """Do not let the processes of a vLLM import it again, nor compile its sampler.

    It would compile at the first request with log-probabilities, which on CPUs takes 3.3 s of CPU
    time, and more with an empty cache of compiled code.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_VLLM_FORKS", "1")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield
