"""API keys that a fleet issues: records without secrets, and their table in Redis."""
