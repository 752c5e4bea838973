"""Lab: good and bad versions of a model as canaries."""
