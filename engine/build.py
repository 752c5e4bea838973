"""From settings to an engine that is proven to compute: chooses the backend, which does the rest."""
