"""Words of a user, and answers of a server or a model, that would steer a terminal."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.cli.main import app, main
from fleet.private_logs import logs_of

HOSTILE = "\x1b[31m\x1b]52;c;aGVq\x07\u202e\0\ud800"
SHOWN = r"\x1b[31m\x1b]52;c;aGVq\x07\u202e\x00\ud800"


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send({"data": [{"id": "m"}], "lines": [], "error": {"message": HOSTILE}})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        event = json.dumps({"choices": [{"delta": {"content": f"{HOSTILE} é 日本"}}]})
        self._send_bytes(f"data: {event}\n\ndata: [DONE]\n\n".encode())

    def _send(self, value: object) -> None:
        self._send_bytes(json.dumps(value).encode())

    def _send_bytes(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("x-baton-route", "a\x1b[31mb")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_answer_of_a_model_does_not_steer_the_terminal(url: str) -> None:
    result = CliRunner().invoke(app, ["chat", "hi", "--url", url])
    assert result.exit_code == 0
    assert f"{SHOWN} é 日本" in result.output and r"a\x1b[31mb" in result.output


@pytest.mark.parametrize(
    "words",
    [
        ("usage", "--by", "\x01"),
        ("usage", "--by", "\udcff"),
        ("chat", "\udcff"),
        ("chat", "hi", "--mode", "\u202e"),
    ],
)
def test_words_that_no_call_can_have_are_no_traceback(url: str, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, "--url", url])
    assert result.exit_code in (0, 1)
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("command", [("chat", "hi"), ("batch", "x"), ("status",), ("usage",)])
def test_an_address_that_is_none_is_an_error(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*command, "--url", "http://\x01/"])
    assert result.exit_code == 1 and "error" in result.output


def test_a_name_of_100000_characters_is_no_file() -> None:
    assert CliRunner().invoke(app, ["serve", 100_000 * "a", "--wrong"]).exit_code in (1, 2)


def test_arguments_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["baton", "drain", "\udcff"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


def test_the_name_of_a_log_leads_nowhere_else(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for file in (tmp_path / "secret.log", folder / "worker-1.log", folder / "worker-10.log"):
        file.write_text("x")
    for name in ("../secret", "/dev/zero", "*", "**/", "[a-z]"):
        assert logs_of(name, folder) == []
    assert logs_of("worker-1", folder) == [folder / "worker-1.log"]
