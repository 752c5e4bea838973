"""The fleet of the router's tests."""

from tests.router.conftest import artifact, make_fleet, model

__all__ = ["artifact", "make_fleet", "model"]
