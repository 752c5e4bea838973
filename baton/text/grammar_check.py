"""Compilation of untrusted grammars in a separate process, which may crash.

    python -m baton.text.grammar_check

A grammar of a few lines can keep llguidance busy for long, take all memory, or overflow the stack.
The router kills this process after a timeout and treats its exit as a rejection. A grammar that
compiles here with a quarter of the usual stack also compiles in an engine.

Frames (``baton/text/confined.py``) on stdin are first a ``Vocabulary``, answered by an empty error
once it is loaded, then one ``Question`` after the other, each answered by a ``TriedGrammar``.
"""

import threading

import msgspec

from baton.text.confined import forbid_files, limit_process, read_frame, write_frame
from baton.text.grammar import ANY_OBJECT, GrammarCompiler, GrammarKind, Vocabulary, translate
from baton.types.errors import GrammarError

_STACK_BYTES = 2 << 20
_MEMORY_BYTES = 4 << 30


class Question(msgspec.Struct, frozen=True):
    """Request to compile a grammar."""

    kind: GrammarKind
    source: str


class TriedGrammar(msgspec.Struct, frozen=True):
    """Grammar for the engines, or the reason for its rejection."""

    grammar: str = ""
    error: str = ""


def _serve() -> None:
    try:
        compiler = GrammarCompiler(msgspec.msgpack.decode(read_frame(), type=Vocabulary))
    except GrammarError as error:
        write_frame(TriedGrammar(error=error.message))
        return
    translate("json", ANY_OBJECT)  # imports all that grammars need
    forbid_files()
    write_frame(TriedGrammar())
    while body := read_frame():
        question = msgspec.msgpack.decode(body, type=Question)
        try:
            grammar = translate(question.kind, question.source)
            compiler.compile(grammar)
            write_frame(TriedGrammar(grammar=grammar))
        except GrammarError as error:
            write_frame(TriedGrammar(error=error.message))


def main() -> None:
    """Serve requests until stdin ends."""
    limit_process(_MEMORY_BYTES)
    threading.stack_size(_STACK_BYTES)
    server = threading.Thread(target=_serve)
    server.start()
    server.join()


if __name__ == "__main__":
    main()
