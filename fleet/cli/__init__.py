"""Commands of the ``baton`` program."""
