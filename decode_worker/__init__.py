"""Decode worker: owns requests, receives KV, and generates responses."""
