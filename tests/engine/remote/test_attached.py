"""What an attached server may send."""

from types import SimpleNamespace
from typing import Any

from baton.engine.remote.attached import AttachedEngine
from baton.types import events as ev
from baton.types.params import SampledToken


class Closing:
    """Exchange that notes its end."""

    closed = False

    def close(self) -> None:
        self.closed = True


def run_of(count: int, reason: str, index: int = 0) -> ev.Tokens:
    tokens = tuple(map(SampledToken, range(count)))
    stop = 7 if reason == "stop" else None
    return ev.Tokens(
        request_id="r", choice=0, index=index, tokens=tokens, finish_reason=reason, stop_token=stop
    )


def checked(*runs: ev.Tokens) -> tuple[list[ev.Tokens], bool]:
    """Return what remains of a response of at most 4 tokens, and whether it was ended here."""
    exchange = Closing()
    request: Any = SimpleNamespace(
        spec=SimpleNamespace(params=SimpleNamespace(max_tokens=4)),
        sufficed=set(),
        exchanges={0: exchange},
    )
    engine: Any = SimpleNamespace(_check_vocabulary=lambda tokens: None)
    return AttachedEngine._checked(engine, request, 0, list(runs)), exchange.closed


def test_a_response_has_no_more_tokens_than_were_asked_for() -> None:
    """Those that came together with the finish reason were passed on."""
    for reason in ("", "length", "stop"):
        (run,), ended = checked(run_of(9, reason))
        assert ended
        assert (len(run.tokens), run.finish_reason, run.stop_token) == (4, "length", None)
    assert checked(run_of(4, "stop")) == ([run_of(4, "stop")], False)
    assert checked(run_of(3, ""), run_of(1, "", 3))[0][1].finish_reason == "length"
