"""A real Redis, as the registry's tests have it."""

from tests.registry.conftest import redis_server

__all__ = ["redis_server"]
