"""The HTTP front and who serves a request: OpenAI's API, admission, placement, streams to workers.

No torch, no Ray, nothing of a worker's inside.
"""
