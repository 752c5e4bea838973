"""One batch: what it is of, how far it is, how it ends. Pure: events and Unix seconds in.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
        │               ├── cancel ─────────────▶ cancelled
        │               ├── its time is over ───▶ expired
        └───────────────┴── fault ──────────────▶ failed

There is no machine for the lines: what is in the files of answers is done, all else is not. Before
these files are moved to where clients find them, the record names them (``name_files``). A router
that finds named files in a batch that has not ended only ends it.
"""

from typing import Any, Literal

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

_TIMES: tuple[State, ...] = (
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch as it lies on the disk.

    Attributes:
        times_s: When it came into each state, as Unix time.
        fault: Why it fails, or has failed: code and message.
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
        """Whether nothing more will happen."""
        return self.state in ENDED

    @property
    def ended_s(self) -> int:
        """When it ended; 0 while it has not."""
        return self.times_s.get(self.state, 0) if self.ended else 0

    @property
    def is_closing(self) -> bool:
        """Whether no line of it runs any more; all that is left to do is to end it."""
        return bool(self.fault or self.output_file_id or self.error_file_id)

    def begin(self, total: int, now_s: float) -> None:
        """Its file has ``total`` lines."""
        self.total = total
        if self.state == "validating":
            self._become("in_progress", now_s)

    def cancel(self, now_s: float) -> None:
        """The tenant does not want the rest."""
        if self.state in ("validating", "in_progress"):
            self._become("cancelling", now_s)

    def fail(self, code: str, message: str) -> None:
        """Note why no further line can run; `finish` ends the batch as failed."""
        if not self.ended:
            self.fault = (code, message)

    def name_files(self, output: str | None, errors: str | None) -> None:
        """Note the ids that the files of answers get; None for one that is empty."""
        self.output_file_id = output
        self.error_file_id = errors

    def finish(self, now_s: float) -> None:
        """No line runs any more, and the files of answers are whole."""
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
        """As OpenAI shows a batch."""
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
            **{f"{state}_at": self.times_s.get(state) for state in _TIMES},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": self.metadata,
        }
