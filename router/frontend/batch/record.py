"""State machine of one batch. No I/O; its input are events and Unix seconds.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
        │               ├── cancel ─────────────▶ cancelled
        │               ├── end of window ──────▶ expired
        └───────────────┴── fault ──────────────▶ failed

Lines have no state of their own: a line is done if it is in one of the output files. Before these
files are moved to their final place, the record stores their ids (``name_files``). A router that
finds such ids in a batch that has not ended only ends the batch.
"""

from typing import Any, Literal, get_args

import msgspec

State = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: frozenset[State] = frozenset(("completed", "failed", "expired", "cancelled"))


class BatchRecord(msgspec.Struct, kw_only=True):
    """Stored record of a batch.

    Attributes:
        times_s: State to the Unix time at which it began.
        fault: Code and message of the error that makes the batch fail.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_s: int
    expires_s: int
    metadata: dict[str, str] | None = None
    state: State = "validating"
    times_s: dict[str, int] = {}
    total: int = 0
    completed: int = 0
    failed: int = 0
    fault: tuple[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def ended(self) -> bool:
        """True if the batch is in a final state."""
        return self.state in ENDED

    @property
    def ended_s(self) -> int:
        """Unix time of the end; 0 if the batch has not ended."""
        return self.times_s.get(self.state, 0) if self.ended else 0

    @property
    def is_closing(self) -> bool:
        """True if no line runs any more and the batch only has to be ended."""
        return bool(self.fault or self.output_file_id or self.error_file_id)

    def begin(self, total: int, now_s: float) -> None:
        """Start the batch, whose file has ``total`` lines."""
        self.total = total
        if self.state == "validating":
            self._become("in_progress", now_s)

    def cancel(self, now_s: float) -> None:
        """Cancel the remaining lines."""
        if self.state in ("validating", "in_progress"):
            self._become("cancelling", now_s)

    def fail(self, code: str, message: str) -> None:
        """Record why no further line can run; `finish` ends the batch as failed."""
        if not self.ended:
            self.fault = (code, message)

    def name_files(self, output: str | None, errors: str | None) -> None:
        """Record the ids of the output files; None for an empty file."""
        self.output_file_id = output
        self.error_file_id = errors

    def finish(self, now_s: float) -> None:
        """End the batch, whose output files are complete."""
        if self.ended:
            return
        if self.fault is not None:
            self._become("failed", now_s)
        elif self.state == "cancelling":
            self._become("cancelled", now_s)
        elif self.state == "validating" or self.completed + self.failed < self.total:
            self._become("expired", now_s)
        else:
            self._become("finalizing", now_s)
            self._become("completed", now_s)

    def _become(self, state: State, now_s: float) -> None:
        self.state = state
        self.times_s = {**self.times_s, state: int(now_s)}

    def shown(self) -> dict[str, Any]:
        """Return the batch in OpenAI's format."""
        errors = None
        if self.fault is not None:
            code, message = self.fault
            entry = {"code": code, "message": message, "line": None, "param": None}
            errors = {"object": "list", "data": [entry]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.state,
            "output_file_id": self.output_file_id if self.ended else None,
            "error_file_id": self.error_file_id if self.ended else None,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **{f"{state}_at": self.times_s.get(state) for state in get_args(State)[1:]},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }
