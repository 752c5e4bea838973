"""Copies of usage in a router's state folder, from which a Redis without its data gets it back.

    STATE/usage/HOUR.json    fields of the hour as in Redis, written each minute until the hour ends

A field belongs to one life of a process and only grows, so a copy never replaces a field that
Redis has. All routers of a host write the same files.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from baton.registry.json_file import keep
from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.usage.ledger import HOUR_S
from baton.registry.usage.shared import KEPT_DAYS, SharedUsage
from baton.telemetry.tasks import BackgroundTasks

_LOG = logging.getLogger(__name__)

_INTERVAL_S = 60.0


class UsageCopies:
    """Copies of all hours, and the task that keeps them.

    Args:
        shared: Usage in Redis.
        folder: Folder of the copies, which is created.
        count_failure: Receives the name of a failed task.
    """

    def __init__(
        self, shared: SharedUsage, folder: Path, count_failure: Callable[[str], None]
    ) -> None:
        self._shared = shared
        self._folder = folder
        self._tasks = BackgroundTasks("usage copies", count_failure)

    def start(self) -> None:
        """Start copying. Needs a running event loop."""
        self._tasks.keep(self._run, "usage copies")

    async def close(self) -> None:
        """Stop the task, and write the last copy."""
        await self._tasks.close()
        try:
            await self.save()
        except RegistryUnavailableError as error:
            _LOG.warning("cannot copy the usage of the last minute: %s", error)

    async def restore(self) -> None:
        """Give Redis the fields that it lacks, of all hours.

        Raises:
            RegistryUnavailableError: Redis did not answer.
        """
        for hour, file in await asyncio.to_thread(lambda: list(self._files())):
            fields = await asyncio.to_thread(_read, file)
            found = await self._shared.fields(hour)
            missing = {name: value for name, value in fields.items() if name not in found}
            if missing:
                await self._shared.restore(hour, missing)
                _LOG.info("gave Redis its usage back: hour=%d fields=%d", hour, len(missing))

    async def save(self) -> None:
        """Copy the current and the previous hour, and remove copies that are too old.

        Raises:
            RegistryUnavailableError: Redis did not answer.
        """
        now = int(time.time()) // HOUR_S
        for hour in (now - 1, now):
            file = self._folder / f"{hour}.json"
            fields = await self._shared.fields(hour)
            before = await asyncio.to_thread(_read, file)
            if before.keys() - fields.keys():
                await self.restore()  # Redis has lost them
                fields = await self._shared.fields(hour)
            if fields != before:
                await asyncio.to_thread(self._write, file, fields)
        await asyncio.to_thread(self._remove_before, now - KEPT_DAYS * 24)

    async def _run(self) -> None:
        restored = False
        while True:
            try:
                if not restored:
                    await self.restore()
                    restored = True
                await self.save()
            except RegistryUnavailableError as error:
                _LOG.warning("cannot copy usage: %s", error)
            await asyncio.sleep(_INTERVAL_S)

    def _write(self, file: Path, fields: dict[str, str]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep(file, fields)

    def _files(self) -> Iterator[tuple[int, Path]]:
        for file in sorted(self._folder.glob("*.json")):
            if file.stem.isdigit():
                yield int(file.stem), file

    def _remove_before(self, hour: int) -> None:
        for old, file in self._files():
            if old < hour:
                file.unlink(missing_ok=True)


def _read(file: Path) -> dict[str, str]:
    """Return the fields of a copy; none if it is missing or damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        _LOG.warning("cannot read usage from %s: %s", file, error)
        return {}
