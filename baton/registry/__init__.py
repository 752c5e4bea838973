"""What Redis holds: the workers, and the hashes of their blocks. Redis may be away at any time.

    publisher = KvEventPublisher(registry, incarnation)   # a worker: .start(), .publish(...)
    presence = Presence(registry, record)                 # a worker: .start(), .update("ready")
    async for change in RegistryWatcher(registry): ...    # a router
    async for item in EventFeed(registry): ...            # Snapshot, EventBatch, Heartbeat, …

None of these raises when Redis is away, restarts empty, or comes back old; all heal by themselves.
"""
