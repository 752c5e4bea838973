"""Sampling of tokens from logits, for both backends, with grammars and draft tokens.

Runners use ``step_sampler.py``.
"""
