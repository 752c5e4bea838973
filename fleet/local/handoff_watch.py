"""Watch for a fleet whose KV hand-offs all fail, as behind a firewall between its workers.

Requests with mode ``auto`` are answered all the same: decode workers compute their prompts.
"""

import contextlib
import threading
from collections.abc import Callable

import httpx
import msgspec

from fleet.local.http_trust import trusted

_LOOK_EVERY_S = 15.0
_ANSWER_LIMIT_S = 3.0
_LEAST_FAILURES = 5
_FAILING = (
    "warning: all KV hand-offs fail ({failures} since the last success): decode workers compute "
    "the prompts; see `baton doctor --edges` and `baton logs WORKER`"
)
_WORKING = "KV hand-offs work again"
_RESTARTING = (httpx.HTTPError, OSError, ValueError, KeyError, msgspec.MsgspecError)  # a router


class Transfers(msgspec.Struct, frozen=True):
    """Totals of the fleet's KV transfers."""

    count: int
    failures: int


class HandoffState:
    """Decision whether all hand-offs fail, from successive totals. Pure."""

    def __init__(self) -> None:
        self._last_success: Transfers | None = None
        self._failing = False

    def note(self, totals: Transfers) -> str:
        """Return a line for the console; empty without news."""
        last = self._last_success
        if last is None or totals.count != last.count or totals.failures < last.failures:
            self._last_success = totals
            news = _WORKING if self._failing else ""
            self._failing = False
            return news
        failures = totals.failures - last.failures
        if self._failing or failures < _LEAST_FAILURES:
            return ""
        self._failing = True
        return _FAILING.format(failures=failures)


def watch_handoffs(read: Callable[[], Transfers], say: Callable[[str], None]) -> Callable[[], None]:
    """Read the totals in a thread, and show the news; return the function that ends the thread."""
    stopped = threading.Event()

    def watch() -> None:
        state = HandoffState()
        while not stopped.wait(_LOOK_EVERY_S):
            with contextlib.suppress(*_RESTARTING):
                if line := state.note(read()):
                    say(line)

    threading.Thread(target=watch, daemon=True, name="hand-offs").start()
    return stopped.set


def read_transfers(url: str, token: str, certificate: str) -> Transfers:
    """Return the totals that a router reports."""
    answer = httpx.get(
        f"{url}/fleet",
        headers={"authorization": f"Bearer {token}"},
        timeout=_ANSWER_LIMIT_S,
        trust_env=False,
        verify=trusted(certificate),
    )
    answer.raise_for_status()
    return msgspec.convert(answer.json()["transfers"], Transfers)
