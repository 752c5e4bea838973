"""Errors as commands print them: no numbers of the system, no advice of libraries."""

import socket
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from fleet.cli.main import app
from loadtest.metrics.summary import parse_slo
from loadtest.reasons import answer_reason, file_reason, http_reason
from tests.loadtest.tiny_server import Stream, tiny_server


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


async def refuse(_body: dict, stream: Stream) -> None:
    await stream.head(401, "application/json")
    await stream.raw(b'{"error": {"message": "a valid API key is required"}}')
    await stream.end()


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code, result.output
    return result.output.replace("\n", " ")


def test_a_refused_call_has_the_servers_message() -> None:
    request = httpx.Request("GET", "http://a/v1/models")
    answer = httpx.Response(403, json={"error": {"message": "no"}}, request=request)
    with pytest.raises(httpx.HTTPStatusError) as caught:
        answer.raise_for_status()
    assert http_reason(caught.value) == "403: no"
    assert answer_reason(httpx.Response(502, text="<html>", request=request)) == "502: <html>"
    assert answer_reason(httpx.Response(502, request=request)) == "502: Bad Gateway"


def test_a_certificate_of_an_unknown_ca_names_the_option() -> None:
    text = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get issuer"
    assert "`baton --cacert FILE` or BATON_CACERT" in http_reason(httpx.ConnectError(text))
    assert "cacert" not in http_reason(httpx.ConnectError("Connection refused"))


def test_chat_with_a_wrong_key_names_where_the_key_comes_from() -> None:
    with tiny_server(refuse) as server:
        text = run("chat", "hi", "--url", server.url)
    assert "401: a valid API key is required; " in text
    assert "OPENAI_API_KEY" in text
    assert "mozilla" not in text


@pytest.mark.parametrize(
    "command", [("chat", "hi"), ("loadtest", "poisson", "--out", "run"), ("keys", "ls")]
)
def test_a_server_that_is_away_is_named_without_a_number(command: tuple[str, ...]) -> None:
    text = run(*command, "--url", f"http://127.0.0.1:{free_port()}")
    assert "cannot connect: Connection refused" in text
    assert "Errno" not in text
    assert "--model" not in text


def test_a_file_that_is_missing_is_named_without_a_number(tmp_path: Path) -> None:
    missing = str(tmp_path / "nope.jsonl")
    assert file_reason(FileNotFoundError(2, "No such file", "a")) == "a: No such file"
    for command in (
        ("loadtest", "replay", missing, "--out", str(tmp_path / "run"), "--url", "http://a"),
        ("simulate", missing),
    ):
        text = run(*command)
        assert "No such file or directory" in text
        assert "Errno" not in text


def test_a_limit_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="tpot_s=x: a limit must be a positive number"):
        parse_slo("ttft_s=1,tpot_s=x")
