"""The step loop and grammars: compiled beside it, and a bad one ends only its own request."""

import os
import socket
import threading

import msgspec
import numpy as np
import pytest

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import build, messages
from baton.engine.process.step_loop import serve
from baton.engine.sampling.grammars import Grammars
from baton.engine.settings import EngineSettings
from baton.text.grammar import Vocabulary, translate
from baton.types import events as ev
from baton.types.params import SamplingParams


@pytest.fixture
def engine(monkeypatch):
    """The shell's end of an emulated engine that takes grammars."""
    letters = Vocabulary([bytes([i]) for i in range(256)], [0], [0])
    build_emulated = build.build_emulated

    grammars = Grammars(lambda: letters, 256)

    def with_grammars(settings, pool_fd):
        runner, info = build_emulated(settings, pool_fd)
        runner.grammars = grammars
        runner.capabilities = msgspec.structs.replace(runner.capabilities, grammars=True)
        return runner, info

    monkeypatch.setattr(build, "build_emulated", with_grammars)
    shell, control = socket.socketpair()
    pool_fd = os.memfd_create("pool")
    settings = EngineSettings(model=build.EMULATED, kv_blocks=32)
    loop = threading.Thread(target=serve, args=(settings, control, pool_fd))
    loop.start()
    shell.settimeout(10)
    yield shell
    shell.sendall(messages.frame([messages.StopEngine()]))
    loop.join(10)
    assert not grammars._held, "a grammar is held for a request that has ended"
    shell.close()
    control.close()
    os.close(pool_fd)


def submit(name: str, grammar: str = "") -> messages.Submit:
    prompt = np.arange(5, dtype="<u4").tobytes()
    params = SamplingParams(max_tokens=4, ignore_eos=True, grammar=grammar)
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=bytes(16))
    return messages.Submit(request_id=name, prompt_token_ids=prompt, spec=spec)


def ends(shell: socket.socket, count: int) -> dict[str, str]:
    """Error codes of the first ``count`` requests to end."""
    reader, found = messages.report_reader(), {}
    while len(found) < count:
        for report in reader.feed(shell.recv(1 << 16)):
            if isinstance(report, ev.Ended):
                found[report.request_id] = report.error_code
    return found


def test_a_bad_grammar_ends_only_its_own_request(engine):
    good = translate("regex", "(?s:.*)")
    commands = [submit("free"), submit("bad", "start: missing"), submit("good", good)]
    engine.sendall(messages.frame(commands))
    assert ends(engine, 3) == {"free": "", "bad": "invalid_grammar", "good": ""}


def test_a_request_ends_while_its_grammar_is_compiled(engine):
    slow = translate("json", '{"enum": ["' + '", "'.join(f"value {i}" for i in range(3000)) + '"]}')
    engine.sendall(messages.frame([submit("gone", slow), messages.Cancel("gone"), submit("free")]))
    assert ends(engine, 2) == {"gone": "cancelled", "free": ""}
