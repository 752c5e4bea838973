"""The fleet's registry and prefix index in Redis: the names that workers and routers use.

A worker::

    registry = Registry(url, fleet)
    publisher = KvEventPublisher(registry, incarnation)   # .start(), .publish(stored, removed)
    presence = Presence(registry, record)                 # .start(), .update("ready"), .stop()

A router::

    async for change in RegistryWatcher(registry, last_known=path): ...
    async for item in EventFeed(registry): ...  # Snapshot, EventBatch, Heartbeat, Forget

Redis may be away, restart empty, or come back old at any time: none of these raises for it, and
all of them heal by themselves.
"""

from registry.kv_events import EventFeed, FeedMachine, KvEventPublisher, NameLedger
from registry.redis_store import Registry, RegistryUnavailableError
from registry.types import (
    EventBatch,
    FeedItem,
    Forget,
    Heartbeat,
    Snapshot,
    WorkerRecord,
    names_checksum,
)
from registry.workers import Presence, RegistryWatcher, WorkerChange

__all__ = [
    "EventBatch",
    "EventFeed",
    "FeedItem",
    "FeedMachine",
    "Forget",
    "Heartbeat",
    "KvEventPublisher",
    "NameLedger",
    "Presence",
    "Registry",
    "RegistryUnavailableError",
    "RegistryWatcher",
    "Snapshot",
    "WorkerChange",
    "WorkerRecord",
    "names_checksum",
]
