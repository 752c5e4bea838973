"""KV over TCP connections of its own, without gRPC around it."""
