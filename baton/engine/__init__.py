"""Inference engine of both kinds of worker: tokens in, tokens out. No Ray, no network."""
