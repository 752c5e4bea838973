"""How the tests are shared out between two processes (`make test` runs them with xdist)."""

import pytest

_SHARED = ("client", "shared")  # fixtures that stand on the one fleet that is started per process


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file stays together, for its fixtures; so do all tests of the shared fleet."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        together = any(name in fixtures for name in _SHARED) and "e2e" in item.path.parts
        group = "e2e" if together else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
