"""One fleet for all tests that leave its workers alive."""

import pytest
from openai import OpenAI

from tests.e2e.fleet_processes import fleet


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("f"), "prefill-0", "prefill-1", "decode-0") as running:
        yield running


@pytest.fixture(
    scope="module", params=["disaggregated", pytest.param("colocated", marks=pytest.mark.slow)]
)
def client(request, shared):
    """The official client, in each mode. That the modes answer alike is `tests/matrix`' to show."""
    headers = {"x-baton-mode": request.param}
    with OpenAI(base_url=f"{shared.url}/v1", api_key="none", default_headers=headers) as made:
        yield made


@pytest.fixture(scope="module")
def anywhere(shared):
    """For what the mode has no part in."""
    with OpenAI(base_url=f"{shared.url}/v1", api_key="none") as made:
        yield made
