"""Deletion of a tenant by all parts of the fleet, and the receipt."""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec

from baton.registry.redis_store import RegistryUnavailableError
from baton.tenants.deletions import MAX_TAGS, Deletion, Forgotten
from baton.tenants.erasures import Erasures
from baton.tenants.shared_limits import MAX_TENANTS, LimitsTable
from baton.types.block_hashes import tag_of
from router.process import Process
from router.sources import Sources
from router.tenants.limits_table import SyncedLimits

LIMIT_S = 20.0
"""Time after which routers and workers that have not reported are named in the receipt."""
_POLL_S = 0.1
_ERRORS = {
    "errors": "its files or logs: see its log",
    "logs_elsewhere": "texts that it logged to another place than the folder of the logs",
}


async def delete_tenant(
    router: Process, sources: Sources, synced: SyncedLimits, tenant: str
) -> dict[str, Any]:
    """Delete a tenant's limits, data and KV, and return the receipt.

    Raises:
        TableChangeError, RegistryUnavailableError: Nothing was deleted.
    """
    shared = router.settings.share_cache
    made: list[tuple[Deletion, bool]] = []

    def edit(before: LimitsTable, now_ms: int) -> LimitsTable:
        deletion = Deletion(secrets.token_hex(8), now_ms)
        made.append((deletion, tenant in before.tenants))
        kept = {name: limits for name, limits in before.tenants.items() if name != tenant}
        forgotten = _forgetting(before.forgotten, tenant, deletion, shared=shared)
        return msgspec.structs.replace(before, tenants=kept, forgotten=forgotten)

    await synced.change(edit)
    deletion, had_limits = made[-1]
    source = router.policies.file
    in_file = source is not None and source.is_used and tenant in router.policies.all
    workers = {
        slot.worker_id for slot in router.lanes.slots if slot.state not in ("dead", "parked")
    }
    routers = router.lanes.first.gateway.shares.known_routers
    left = [f"limits: they are in {source.file}"] if source is not None and in_file else []
    deleted: Counter[str] = Counter()
    reports = await _all_reports(sources.erasures, deletion.id, workers, routers, left)
    # Afterwards, because calls may store some until all routers know of the deletion.
    deleted["responses"] = await _delete_responses(sources, tenant, left)
    try:
        await router.quotas.forget(tenant)
    except RegistryUnavailableError:
        left.append("use of its limits: Redis does not answer; repeat the command")
    kv: Counter[str] = Counter()
    for name, counts in sorted(reports.items()):
        of_router = name.startswith("router ")
        for kind, count in counts.items():
            if kind in _ERRORS:
                left.append(f"{name}: {_ERRORS[kind]}")
            elif kind.startswith("batch_"):
                left.append(f"{name}: answers of {kind}, whose lines have not ended yet")
            elif count < 0:
                left.append(f"{name}: KV in its {kind} tier, see its log")
            else:
                (deleted if of_router else kv)[kind] += count
    return {
        "tenant": tenant,
        "deletion": deletion.id,
        "time": datetime.fromtimestamp(deletion.at_ms / 1000, UTC).isoformat(),
        "limits": had_limits,
        "deleted": {
            **{kind: deleted[kind] for kind in ("responses", "files", "batches", "log_lines")},
            "kv_blocks": {kind: kv[kind] for kind in ("pool", "memory", "disk")},
        },
        "confirmed_by": sorted(reports),
        "shared_cache": shared,
        "not_deleted": sorted(set(left)),
        "valid_keys": _keys_of(router, tenant),
    }


def _forgetting(before: Forgotten, tenant: str, deletion: Deletion, *, shared: bool) -> Forgotten:
    """Return the deletions with another one, which gives the tenant's cache a new salt."""
    tag = tag_of(before.owner_of(tenant, shared=shared)).hex()
    tags = {**before.tags, tag: deletion.id}
    deletions = {name: earlier for name, earlier in before.deletions.items() if name != tenant}
    deletions[tenant] = deletion
    return Forgotten(
        deletions=dict(list(deletions.items())[-MAX_TENANTS:]),
        salts={**before.salts, "" if shared else tenant: secrets.token_hex(16)},
        tags=dict(list(tags.items())[-MAX_TAGS:]),
    )


async def _delete_responses(sources: Sources, tenant: str, left: list[str]) -> int:
    try:
        return await sources.responses.delete_all(tenant)
    except RegistryUnavailableError:
        left.append("stored responses: Redis does not answer; repeat the command")
        return 0


async def _all_reports(
    erasures: Erasures, deletion: str, workers: set[str], routers: int, left: list[str]
) -> dict[str, dict[str, int]]:
    """Return the reports of routers and workers; name the missing ones in ``left``."""
    until_s = time.monotonic() + LIMIT_S
    reports: dict[str, dict[str, int]] = {}
    while True:
        with contextlib.suppress(RegistryUnavailableError):  # the missing reports are named
            reports = await erasures.reports(deletion)
        missing = workers - reports.keys()
        absent = routers - sum(name.startswith("router ") for name in reports)
        if not missing and absent <= 0:
            return reports
        if time.monotonic() > until_s:
            left += [f"{name}: has not confirmed; it erases its KV later" for name in missing]
            if absent > 0:
                left.append(f"routers that have not confirmed: {absent}")
            return reports
        await asyncio.sleep(_POLL_S)


def _keys_of(router: Process, tenant: str) -> int:
    now_ms = time.time_ns() // 1_000_000
    of_file = list(router.access.keys_of(tenant, now_ms))
    issued = [
        key
        for key in router.access.issued_keys
        if key.rights.tenant == tenant and key.record.state(now_ms) == "valid"
    ]
    return len(of_file) + len(issued)
