"""Commands of ``baton loadtest``; ``loadtest/cli.py`` combines them."""
