"""Health checks of Ray's daemons that do not use Ray.

Ray's own calls wait a minute for a head that is gone, then end the calling process; the controller,
an actor, responds even without a head. So local daemons are checked in /proc, and the head by gRPC
from a thread.
"""

import threading
import time
from collections.abc import Mapping

import grpc

from baton.wire.grpc_options import NO_PROXY
from fleet.process_key import ProcessKey

LOOK_EVERY_S = 4.0
_ANSWER_WITHIN_S = 3.0
_LOOKS = 5  # without a response in a row
_METHOD = "/grpc.health.v1.Health/Check"
_SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class RayHealth:
    """Watches Ray's head, by the address of its GCS, and the daemons of a local Ray.

    The daemons must all run, as Ray restarts none of them.
    """

    def __init__(
        self,
        gcs_address: str,
        daemons: Mapping[str, ProcessKey],
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._address = gcs_address
        self._daemons = dict(daemons)
        self._look_every_s = look_every_s
        self._unanswered = 0
        self._stop = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="ray health").start()

    def problem(self) -> str:
        """Return the reason if Ray is lost; empty otherwise."""
        for name, key in self._daemons.items():
            if key.find() is None:
                return f"Ray's {name} (pid {key.pid}) died"
        if self._unanswered >= _LOOKS:
            return f"Ray's head at {self._address} did not respond to {_LOOKS} checks in a row"
        return ""

    @property
    def answers(self) -> bool:
        """Return whether the head responded to the last check."""
        return self._unanswered == 0

    def close(self) -> None:
        """Stop checking the head."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            self._unanswered = 0 if self._responds() else self._unanswered + 1
            self._stop.wait(max(0.0, began_s + self._look_every_s - time.monotonic()))

    def _responds(self) -> bool:
        """Return whether the head responds at all; a rejection counts."""
        with grpc.insecure_channel(self._address, options=[NO_PROXY]) as channel:
            try:
                # The empty message asks for the health of the whole server.
                channel.unary_unary(_METHOD, bytes)(b"", timeout=_ANSWER_WITHIN_S)
            except grpc.RpcError as error:
                return error.code() not in _SILENCE
        return True
