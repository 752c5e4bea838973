"""Faster encoding with the same token ids: another library, cached segments."""
