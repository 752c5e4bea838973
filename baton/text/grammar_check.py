"""Compilation of untrusted grammars in a separate process, which may crash.

    python -m baton.text.grammar_check

A grammar of a few lines can keep llguidance busy for long, take all memory, or overflow the stack.
The router kills this process after a timeout and treats its exit as a rejection. A grammar that
compiles here with a quarter of the usual stack also compiles in an engine.

Frames on stdin and stdout are a 4-byte little-endian length and msgpack: first a ``Vocabulary``,
answered by an empty error once it is loaded, then one ``Question`` after the other, each answered
by a ``Verdict``. The process ends with its stdin.
"""

import os
import resource
import signal
import struct
import sys
import threading

import msgspec

from baton.text.grammar import GrammarCompiler, GrammarKind, Vocabulary, translate
from baton.types.errors import GrammarError

LENGTH = struct.Struct("<I")
_STACK_BYTES = 2 << 20
_MEMORY_BYTES = 4 << 30


class Question(msgspec.Struct, frozen=True):
    """Request to compile a grammar."""

    kind: GrammarKind
    source: str


class Verdict(msgspec.Struct, frozen=True):
    """Grammar for the engines, or the reason for its rejection."""

    grammar: str = ""
    error: str = ""


def frame(message: object) -> bytes:
    """Return one message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def _read() -> bytes:
    head = sys.stdin.buffer.read(LENGTH.size)
    return sys.stdin.buffer.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def _write(verdict: Verdict) -> None:
    sys.stdout.buffer.write(frame(verdict))
    sys.stdout.buffer.flush()


def _serve() -> None:
    try:
        compiler = GrammarCompiler(msgspec.msgpack.decode(_read(), type=Vocabulary))
    except GrammarError as error:
        _write(Verdict(error=error.message))
        return
    _write(Verdict())
    while body := _read():
        question = msgspec.msgpack.decode(body, type=Question)
        try:
            grammar = translate(question.kind, question.source)
            compiler.compile(grammar)
            _write(Verdict(grammar=grammar))
        except GrammarError as error:
            _write(Verdict(error=error.message))


def main() -> None:
    """Serve requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C: the router decides
    os.nice(5)  # workers have priority
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    server = threading.Thread(target=_serve)
    server.start()
    server.join()


if __name__ == "__main__":
    main()
