"""What the tests of tenants share: a real Redis."""

from tests.registry.conftest import redis_server, registry

__all__ = ["redis_server", "registry"]
