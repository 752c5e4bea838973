"""One fleet for all tests that leave its workers alive."""

import pytest

from tests.e2e.fleet_processes import fleet


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    with fleet(tmp_path_factory.mktemp("f"), "prefill-0", "prefill-1", "decode-0") as running:
        yield running
