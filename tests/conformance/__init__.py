"""Answers of a running router, judged by the specifications of OpenAI and Anthropic."""
