"""Registry in Redis: workers and the hashes of their blocks. Works without Redis, too.

    publisher = KvEventPublisher(registry, incarnation)   # a worker: .start(), .publish(...)
    presence = Presence(registry, record)                 # a worker: .start(), .update("ready")
    async for change in RegistryWatcher(registry): ...    # a router
    async for item in EventFeed(registry): ...            # Snapshot, EventBatch, Heartbeat, …

None of these raises if Redis is unreachable, restarts empty, or returns with old data; all recover.
"""
