"""Modules that vLLM imports in its own interpreter; this folder is in its ``PYTHONPATH``.

They import vLLM and its requirements, and nothing of Baton. Baton does not import them.
"""
