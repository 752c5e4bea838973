"""Fleet file: keys, limits, and error messages. Has no side effects."""
