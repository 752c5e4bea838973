"""Deletion of what one host has of a tenant: files, batches, and texts in logs. All block."""

import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import msgspec

from router.frontend.batch.store import BatchStore

_CANCEL_LIMIT_S = 8.0
_POLL_S = 0.1
_PATTERNS = ("router.log", "router.log.1", "router-*.log", "router-*.log.1")
_TEXTS = {"prompt": "", "answers": [], "reason": ""}


def delete_files(store: BatchStore, tenant: str, until_ms: int) -> dict[str, int]:
    """Delete a tenant's files and batches of a time; cancel running batches first.

    Returns:
        The number of deleted ``files`` and ``batches``. Another router of this host may delete
        some at the same time; each is counted by one. The id of a batch whose lines did not end in
        time has 1: its record is deleted, and so are its answers when they end.
    """
    counts = {"files": 0, "batches": 0}
    if not (store.root / tenant).is_dir():
        return counts
    batches = [batch for batch in store.batches(tenant) if batch.created_s * 1000 <= until_ms]
    for batch in batches:
        if not batch.ended:
            store.ask_to_cancel(batch)
    give_up_s = time.monotonic() + _CANCEL_LIMIT_S
    while time.monotonic() < give_up_s and any(
        (now := store.batch(tenant, batch.id)) is not None and not now.ended for batch in batches
    ):
        time.sleep(_POLL_S)
    made: set[str | None] = set()
    for batch in batches:
        with store.changing(tenant):
            now = store.batch(tenant, batch.id) or batch
            made |= {now.output_file_id, now.error_file_id}
            was_there = store.remove(tenant, "batches", batch.id)
        if was_there and now.ended:
            counts["batches"] += 1
        elif was_there:
            counts[batch.id] = 1
    for file in store.files(tenant):
        if file.created_s * 1000 <= until_ms or file.id in made:
            counts["files"] += store.remove(tenant, "files", file.id)
    store.sweep_strays(tenant, until_ms / 1000)
    return counts


def blank_texts(folder: Path, until_ms: Mapping[str, int]) -> dict[str, int]:
    """Remove the prompts and responses of tenants from the logs of requests.

    Routers have the logs open, so lines are overwritten in place and keep their length.

    ``until_ms``: time until which lines are changed, by tenant.

    Returns:
        Number of changed lines, by tenant.
    """
    counts = dict.fromkeys(until_ms, 0)
    names = tuple(f'"{tenant}"'.encode() for tenant in until_ms)
    for path in sorted({log for pattern in _PATTERNS for log in folder.glob(pattern)}):
        with path.open("r+b", buffering=0) as file, path.open("rb") as lines:
            at = 0
            for line in lines:
                if line.endswith(b"\n") and any(name in line for name in names):
                    blanked, tenant = _blanked(line, until_ms)
                    if tenant:
                        os.pwrite(file.fileno(), blanked, at)
                        counts[tenant] += 1
                at += len(line)
            os.fsync(file.fileno())
    return counts


def _blanked(line: bytes, until_ms: Mapping[str, int]) -> tuple[bytes, str]:
    """Return a line of the same length without texts, and its tenant; "" if it stays."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
        tenant = str(fields["tenant"])
        time_ms = datetime.fromisoformat(str(fields["time"])).timestamp() * 1000
    except (msgspec.DecodeError, KeyError, ValueError):
        return line, ""
    texts = {name: empty for name, empty in _TEXTS.items() if fields.get(name)}
    if fields.get("logger") != "baton.requests" or not texts:
        return line, ""
    if time_ms > until_ms.get(tenant, 0):
        return line, ""
    short = msgspec.json.encode({**fields, **texts})
    room = len(line) - 1
    return (short if len(short) <= room else b"").ljust(room) + b"\n", tenant
