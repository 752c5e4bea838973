"""Versions of vLLM: which Baton was tested with, and what they changed for workers.

    0.33   a token's alternatives may have one entry more, which ``protocol.py`` leaves out; KV
           events have new fields, which ``kv_events.py`` ignores; ``--disable-lora`` is the new
           name of ``--no-enable-lora``

A worker with another version tests it when it starts, see ``untested.py``.
"""

TESTED = ("0.32",)
"""Minor versions of vLLM with which the tests run."""


def untested(version: str) -> str:
    """Return the warning about a version such as ``0.32.1+cpu``; "" for a tested one."""
    if ".".join(version.split(".")[:2]) in TESTED:
        return ""
    return (
        f"vLLM {version} is not a version that Baton was tested with ({', '.join(TESTED)}): each "
        "worker tests it when it starts"
    )
