"""A router's part in deletions: what its host has of a tenant. It reports to Redis."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from baton.registry.redis_store import RegistryUnavailableError
from baton.tenants.deletions import Deletion
from baton.tenants.erasures import Erasures
from baton.tenants.shared_limits import LimitsTable
from router.frontend.batch.calls import store_of
from router.frontend.operators.deletion.local import blank_texts, delete_files
from router.process import Process
from router.settings import ProcessSettings

_LOG = logging.getLogger(__name__)

ALL_FOLLOW_S = 1.0
"""Time after which all routers know of a deletion."""
_GRACE_MS = 2000  # things of the tenant that are this much younger are deleted, too
_REPORT_TRIES = 60
_PAUSE_S = 1.0


class DeletionFollower:
    """Carries out the deletions in the table of tenants.

    At the start of the router these are all of them: it may have been down. What the tenants have
    stored since is younger, and stays.
    """

    def __init__(self, router: Process, erasures: Erasures) -> None:
        self._router = router
        self._erasures = erasures
        self._known: set[str] = set()

    def receive(self, table: LimitsTable) -> None:
        """Start the deletions that this router does not know yet."""
        new = {
            tenant: deletion
            for tenant, deletion in table.forgotten.deletions.items()
            if deletion.id not in self._known
        }
        if new:
            self._known.update(deletion.id for deletion in new.values())
            for tenant in new:
                self._router.quotas.quotas.forget(tenant)
                self._router.core.session_prompts.forget(tenant)
            self._router.tasks.spawn(self._carry_out(new), "deletion")

    async def _carry_out(self, deletions: Mapping[str, Deletion]) -> None:
        await asyncio.sleep(ALL_FOLLOW_S)
        counts = await asyncio.to_thread(self._delete, deletions)
        for tenant, deletion in deletions.items():
            _LOG.info("deleted the data of tenant=%s: %s", tenant, counts[tenant])
            await self._report(deletion.id, counts[tenant])

    def _delete(self, deletions: Mapping[str, Deletion]) -> dict[str, dict[str, int]]:
        settings = self._router.settings
        until_ms = {tenant: deletion.at_ms + _GRACE_MS for tenant, deletion in deletions.items()}
        counts: dict[str, dict[str, int]] = {tenant: {} for tenant in deletions}
        try:
            store = store_of(self._router)
            if store is not None:
                for tenant in deletions:
                    counts[tenant] |= delete_files(store, tenant, until_ms[tenant])
            folder = _log_folder(settings)
            if folder is not None:
                for tenant, lines in blank_texts(folder, until_ms).items():
                    counts[tenant]["log_lines"] = lines
        except OSError as error:
            _LOG.warning("cannot delete data of tenants=%d: %s", len(deletions), error)
            for count in counts.values():
                count["errors"] = 1
        if _logs_elsewhere(settings):
            for count in counts.values():
                count["logs_elsewhere"] = 1
        return counts

    async def _report(self, deletion: str, counts: Mapping[str, int]) -> None:
        for _ in range(_REPORT_TRIES):
            try:
                await self._erasures.report(deletion, f"router {self._router.router_id}", counts)
                return
            except RegistryUnavailableError:
                await asyncio.sleep(_PAUSE_S)


def _log_folder(settings: ProcessSettings) -> Path | None:
    if settings.logs.dir:
        return Path(settings.logs.dir).expanduser()
    return Path(settings.state_dir) / "logs" if settings.state_dir else None


def _logs_elsewhere(settings: ProcessSettings) -> bool:
    """Return whether this process logs texts to another place than the folder of the logs."""
    if not (settings.logs.requests and settings.logs.format == "json"):
        return False
    folder = _log_folder(settings)
    target = Path("/proc/self/fd/2").readlink()
    return folder is None or target.parent != folder.resolve()
