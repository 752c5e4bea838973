"""`baton chat`: a conversation in the terminal, over the router's HTTP API."""

import json
from typing import Annotated, Any

import httpx
import typer

from baton.printable import printable
from fleet.cli.common import FleetOption, emulated_note, exits_on, fail, show_error
from fleet.cli.reach import client_of
from loadtest.reasons import answer_reason, http_reason


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One question instead of a conversation.")
    ] = None,
    fleet: FleetOption = None,
    url: Annotated[
        str | None, typer.Option(help="URL of a router elsewhere, such as http://host:8000.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="Value of x-baton-mode: auto, disaggregated or colocated.")
    ] = "auto",
    max_tokens: Annotated[
        int, typer.Option(help="Maximum output tokens per response.", min=1)
    ] = 256,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0, max=2)
    ] = 0.0,
) -> None:
    """Chat with the model. Each response is followed by the workers that served it.

    The API key is read from OPENAI_API_KEY.
    """
    headers = {"x-baton-mode": mode}
    with exits_on(httpx.InvalidURL, UnicodeError), client_of(fleet, url, headers) as client:
        try:
            _talk(client, prompt, {"max_tokens": max_tokens, "temperature": temperature})
        except httpx.HTTPError as error:
            fail(f"{client.base_url}: {http_reason(error)}")


def _talk(client: httpx.Client, prompt: str | None, sampling: dict[str, float]) -> None:
    """Send one prompt, or every line of the terminal until the end of input."""
    messages: list[dict[str, str]] = []
    for question in [prompt] if prompt is not None else _questions():
        messages.append({"role": "user", "content": question})
        answer = _ask(client, messages, sampling)
        if answer is None and prompt is not None:
            raise typer.Exit(1)
        if answer is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def _questions() -> Any:
    typer.echo("Ctrl-D ends the conversation.")
    while True:
        try:
            question = input("you> ").strip()
        except EOFError:
            typer.echo()
            return
        if question:
            yield question


def _ask(
    client: httpx.Client, messages: list[dict[str, str]], sampling: dict[str, float]
) -> str | None:
    """Stream one response to the terminal and return its text; None if it failed."""
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    body = {"model": model, "messages": messages, "stream": True, **sampling}
    parts: list[str] = []
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            answer.read()
            show_error(answer_reason(answer))
            return None
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                typer.echo()
                show_error(event["error"]["message"])
                return None
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                parts.append(text)
                typer.echo(printable(text), nl=False)  # a model could steer the terminal
        typer.echo()
        typer.secho(printable(answer.headers.get("x-baton-route", "")), dim=True, err=True)
        if timing := answer.headers.get("x-baton-emulated"):
            typer.secho(emulated_note(printable(timing)), fg="yellow", err=True)
    return "".join(parts)
