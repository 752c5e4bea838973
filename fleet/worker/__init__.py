"""The worker process: engine, services, registry, its checks and its end."""
