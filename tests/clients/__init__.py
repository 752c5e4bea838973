"""The clients that people bring, each in an environment of its own, against a real router."""
