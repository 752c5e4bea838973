"""Uploaded files, and batches: many requests that run later at the lowest priority."""
