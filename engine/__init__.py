"""Baton's own LLM engine: tokens in, tokens out. Import from its modules; nothing heavy here."""
