"""Whether Ray's daemons still run, found out without Ray.

Its own calls wait for a minute for a head that is gone, then end the process that made them; and
the controller, an actor, goes on to answer without one. So the daemons that this process started
are looked at in /proc, and the head, wherever it is, is asked over gRPC from a thread.
"""

import threading
import time
from collections.abc import Mapping

import grpc

from fleet.process_key import ProcessKey

LOOK_EVERY_S = 4.0
_ANSWER_WITHIN_S = 3.0
_LOOKS = 5  # in a row without an answer; a head on another machine may come back
_METHOD = "/grpc.health.v1.Health/Check"
_SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class RayHealth:
    """Watches Ray's head, and the daemons of a local Ray.

    Args:
        gcs_address: HOST:PORT of the head's control service (GCS).
        daemons: By name, those that must run: Ray restarts none of them.
        look_every_s: Between two questions to the head.
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
        threading.Thread(target=self._ask, daemon=True, name="ray health").start()

    def problem(self) -> str:
        """What is wrong for good; empty if nothing is."""
        for name, key in self._daemons.items():
            if key.find() is None:
                return f"Ray's {name} (pid {key.pid}) died"
        if self._unanswered >= _LOOKS:
            return f"Ray's head at {self._address} has not answered {_LOOKS} times in a row"
        return ""

    @property
    def answers(self) -> bool:
        """Return whether the head answered the last question."""
        return self._unanswered == 0

    def close(self) -> None:
        """Ask no more."""
        self._stop.set()

    def _ask(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            self._unanswered = 0 if self._answers() else self._unanswered + 1
            self._stop.wait(max(0.0, began_s + self._look_every_s - time.monotonic()))

    def _answers(self) -> bool:
        """Any answer is one, a refusal too."""
        with grpc.insecure_channel(self._address) as channel:
            try:
                channel.unary_unary(_METHOD, _no_request)(None, timeout=_ANSWER_WITHIN_S)
            except grpc.RpcError as error:
                return error.code() not in _SILENCE
        return True


def _no_request(_: None) -> bytes:
    """An empty message: all services, of whoever is asked."""
    return b""
