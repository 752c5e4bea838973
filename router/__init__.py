"""The router: OpenAI's API, admission, placement, and streams to the workers.

No torch, no Ray, nothing of a worker's inside. ``frontend`` has the APIs over HTTP, ``routing`` the
life of a request; ``frontend`` imports ``routing``, never the reverse. Below them stand
``request``, ``served_model``, ``adapter_table``, ``synced_table`` and ``settings``.
"""
