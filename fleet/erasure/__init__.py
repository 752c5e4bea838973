"""Erasure of the KV of deleted tenants at a worker."""
