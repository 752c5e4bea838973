"""Tokens in, tokens out: the engine that both kinds of worker run. No Ray, no network."""
