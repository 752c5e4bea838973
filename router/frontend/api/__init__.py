"""OpenAI's API as HTTP: bodies in, answers and events out. Nothing here chooses a worker."""
