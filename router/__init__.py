"""The router: OpenAI's API, admission, placement, and streams to the workers.

No torch, no Ray, nothing of a worker's inside. Rooms, each importing only those after it: ``api``
(HTTP), ``requests`` (a request's life), ``placement`` (which workers), ``workers`` (the streams).
Below them stand ``request``, ``served_model``, ``adapter_table`` and ``settings``.
"""
