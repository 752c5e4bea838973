"""Conversations of agents, whose prompts grow from call to call."""
