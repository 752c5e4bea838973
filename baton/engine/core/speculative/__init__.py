"""Proposal and acceptance of draft tokens. No torch."""
