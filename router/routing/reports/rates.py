"""Rates that the workers report, beyond those in `GET /fleet`."""

from collections.abc import Iterable
from typing import Any

from router.routing.workers.slot import WorkerSlot


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
