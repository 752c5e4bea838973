"""Costs of models beside others in one fleet."""
