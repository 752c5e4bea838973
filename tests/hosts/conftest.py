"""Hosts as namespaces need root on Linux; elsewhere these tests are skipped, and say why."""

import pytest

from tests.hosts.rig.namespaces import unavailable


@pytest.fixture(autouse=True, scope="session")
def hosts_are_possible() -> None:
    if why := unavailable():
        pytest.skip(why)
