"""Endpoint picker of the Gateway API inference extension."""
