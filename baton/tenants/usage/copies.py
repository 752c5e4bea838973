"""Copies of usage in a router's state folder, from which a Redis without its data gets it back.

    STATE/usage/HOUR.json        fields of the hour as in Redis, written each minute until it ends
    STATE/usage/HOUR.LIFE.json   fields of a router that stopped without Redis

A field belongs to one life of a process and only grows, so the larger of two is the later one. All
routers of a host write the first files, and the first that finds one of the second gives its fields
to Redis.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from baton.registry.json_file import keep, kept
from baton.registry.redis_store import RegistryUnavailableError
from baton.telemetry.tasks import BackgroundTasks
from baton.tenants.usage.ledger import HOUR_S, Counters
from baton.tenants.usage.shared import KEPT_DAYS, SharedUsage

_LOG = logging.getLogger(__name__)

_INTERVAL_S = 60.0


class UsageCopies:
    """Copies of all hours, and the task that keeps them.

    Args:
        folder: Folder of the copies, which is created.
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
            lost = _newer(fields, await self._shared.fields(hour))
            if lost:
                await self._shared.restore(hour, lost)
                _LOG.info("gave Redis its usage back: hour=%d fields=%d", hour, len(lost))
            if _is_rest(file):
                file.unlink(missing_ok=True)

    async def keep(self, life: str, rows: Mapping[int, Mapping[str, str]]) -> None:
        """Write the fields of a router that stops without Redis, by hour."""
        for hour, fields in rows.items():
            await asyncio.to_thread(self._write, self._folder / f"{hour}.{life}.json", dict(fields))

    async def save(self) -> None:
        """Copy the current and the previous hour, and remove copies that are too old.

        Raises:
            RegistryUnavailableError: Redis did not answer.
        """
        if any(_is_rest(file) for _, file in await asyncio.to_thread(lambda: list(self._files()))):
            await self.restore()
        now = int(time.time()) // HOUR_S
        for hour in (now - 1, now):
            file = self._folder / f"{hour}.json"
            fields = await self._shared.fields(hour)
            before = await asyncio.to_thread(_read, file)
            if _newer(before, fields):
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
            hour = file.name.partition(".")[0]
            if hour.isdigit():
                yield int(hour), file

    def _remove_before(self, hour: int) -> None:
        for old, file in self._files():
            if old < hour:
                file.unlink(missing_ok=True)


def _is_rest(file: Path) -> bool:
    return not file.stem.isdigit()


def _newer(copy: Mapping[str, str], in_redis: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the fields of a copy that Redis lacks or has an older state of, which comes first."""
    return {
        name: (in_redis.get(name, ""), value)
        for name, value in copy.items()
        if name not in in_redis or _amount(value) > _amount(in_redis[name])
    }


def _amount(counters: str) -> int:
    """Return the sum of counters; 0 for a price, and if they are damaged."""
    try:
        return msgspec.json.decode(counters, type=Counters).amount
    except msgspec.DecodeError:
        return 0


def _read(file: Path) -> dict[str, str]:
    return kept(file, dict[str, str]) or {}
