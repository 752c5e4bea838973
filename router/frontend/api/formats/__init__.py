"""Formats of responses: the interface of all formats, and OpenAI's chat and completions."""
