"""Config, registry, telemetry; Ray pools, controller and the `baton` command on top."""
