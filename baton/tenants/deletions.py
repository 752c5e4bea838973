"""Deletions of tenants that all processes of a fleet carry out."""

import msgspec

MAX_TAGS = 10_000
"""Limit of the tags that workers erase; the oldest are removed first."""


class Deletion(msgspec.Struct, frozen=True):
    """Deletion of one tenant; ``at_ms`` is Redis' time."""

    id: str
    at_ms: int


class Forgotten(msgspec.Struct, frozen=True, kw_only=True):
    """Deletions of all tenants.

    Attributes:
        deletions: Last deletion by tenant.
        salts: Salt of the cache by owner (a tenant, or "" for the cache that all share), which has
            changed with each deletion. It is part of the scope of every request.
        tags: Tags of the blocks to erase, in hexadecimal, to the id of the deletion.
    """

    deletions: dict[str, Deletion] = {}
    salts: dict[str, str] = {}
    tags: dict[str, str] = {}

    def owner_of(self, tenant: str, *, shared: bool) -> str:
        """Return the owner part of the cache scope of a tenant's requests."""
        name = "" if shared else tenant
        salt = self.salts.get(name)
        return name if salt is None else f"{name}:{salt}"
