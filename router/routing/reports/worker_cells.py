"""Workers as short rows for the live page, which asks for them each second.

``GET /fleet`` has all fields, for one worker's details and for programs.
"""

from collections.abc import Iterable
from time import time
from typing import Any

from batonpb.common_pb2 import WorkerStatus

from router.routing.workers.slot import WorkerSlot
from router.routing.workers.table import WorkerTable

COLUMNS = (
    "id",
    "role",
    "state",
    "since_s",
    "running",
    "waiting",
    "kv_total",
    "kv_cached",
    "kv_leased",
    "kv_quarantined",
    "prefill_tokens_per_s",
    "decode_step_s",
    "note",
    "version",
)

_NO_STATUS = WorkerStatus()


class WorkerCells:
    """Rows of all workers, and the time since when each has its state.

    Call `note` once a second: states between two calls are not seen.
    """

    def __init__(self, workers: WorkerTable) -> None:
        self._workers = workers
        self._news = workers.news()
        self._states: dict[str, tuple[str, float]] = {}  # state, and the Unix time of its begin

    def note(self) -> None:
        """Note the states of the workers that changed since the last call."""
        now_s = round(time(), 3)
        for worker_id in self._news:
            slot = self._workers.get(worker_id)
            if slot is None:
                self._states.pop(worker_id, None)
                continue
            state = slot.state
            known = self._states.get(worker_id)
            if known is None or known[0] != state:
                self._states[worker_id] = state, now_s
        self._news.clear()

    def rows(self) -> list[list[Any]]:
        """Return one row per worker, in any order, with the fields of `COLUMNS`."""
        self.note()
        return [self._row(slot) for slot in self._workers.shown()]

    def _row(self, slot: WorkerSlot) -> list[Any]:
        link = slot.link
        state, since_s = self._states[slot.worker_id]
        has_process = state not in ("dead", "parked")
        status = link.status if has_process and link is not None and link.status else _NO_STATUS
        blocks = status.kv_blocks
        return [
            slot.worker_id,
            slot.role,
            state,
            since_s,
            status.running,
            status.waiting,
            blocks.total,
            blocks.cached,
            blocks.leased,
            blocks.quarantined,
            status.prefill_tokens_per_s or None,
            status.decode_step_s or None,
            slot.refusal or slot.reason,
            slot.record.version,
        ]


def rates(slots: Iterable[WorkerSlot]) -> dict[str, dict[str, Any]]:
    """Return each worker's measurements, None where it has none.

    They are prefill in tokens/s, a decode step in seconds, prompt tokens that wait or are being
    computed, and, for a decode worker, bytes/s by prefill worker.
    """
    return {
        slot.worker_id: {
            "prefill_tokens_per_s": status.prefill_tokens_per_s or None,
            "decode_step_s": status.decode_step_s or None,
            "queued_prompt_tokens": status.queued_prompt_tokens,
            "edges_bytes_per_s": {
                edge.prefill_worker_id: edge.bytes_per_s for edge in status.edges
            },
        }
        for slot in slots
        if slot.state not in ("dead", "parked")
        and slot.link is not None
        and (status := slot.link.status)
    }
