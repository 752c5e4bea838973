"""HTTP without bodies and responses: connections, encodings, origins, certificates."""
