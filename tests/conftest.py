"""How the tests are shared out between processes (`make test` runs them with xdist)."""

import os
from typing import Any

# Ray reads this when it is imported, and never again; a fleet's own Ray asks for a token.
os.environ["RAY_AUTH_MODE"] = "token"
import ray  # noqa: F401 - see above

del os.environ["RAY_AUTH_MODE"]

import pytest
from xdist.scheduler import LoadScopeScheduling

E2E = "tests/e2e/"


class ByFile(LoadScopeScheduling):
    """A file stays together, for its fixtures; so does all of e2e, for the fleet that it shares.

    xdist has ``loadgroup`` for this, which pytest 9.2 broke without a word: groups were scattered,
    and every fleet of a module was started in both processes.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return E2E if file.startswith(E2E) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """The scheduler, whatever ``--dist`` says; files in the order of their names."""
    config.option.loadscopereorder = False
    return ByFile(config, log)
