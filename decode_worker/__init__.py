"""The service that owns requests: it takes KV over and writes the answers."""
