"""Calls whose answer is made of prompts' vectors: scores, rankings, and the vectors themselves."""
