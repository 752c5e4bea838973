"""KV over separate TCP connections, without gRPC."""
