"""Tokens in, tokens out: the engine that both kinds of worker run. No Ray, Redis or network here."""
