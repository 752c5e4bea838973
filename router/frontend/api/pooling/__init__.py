"""Calls whose response is computed from vectors of texts: scores, rankings, pooled vectors."""
