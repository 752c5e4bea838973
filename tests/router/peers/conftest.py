"""A real Redis for routers that share."""

from tests.registry.conftest import redis_server

__all__ = ["redis_server"]
