"""Fixtures of the tests of tenants: a real Redis."""

from tests.registry.conftest import redis_server, registry

__all__ = ["redis_server", "registry"]
