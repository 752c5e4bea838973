"""The commands of ``baton loadtest``; ``loadtest/cli.py`` puts them together."""
