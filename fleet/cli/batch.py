"""`baton batch`: a file of requests, run with low priority over the router's batch API."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from baton.printable import printable_json
from fleet.cli.common import FleetOption, exits_on, fail
from fleet.cli.reach import client_of
from loadtest.reasons import answer_reason, http_reason

_ENDED = ("completed", "failed", "expired", "cancelled")
_POLL_S = 1.0
_MOST_LINE_BYTES = 64 << 20  # a device has lines without an end


def batch(
    file: Annotated[str, typer.Argument(help="File of requests, or id of a batch to wait for.")],
    fleet: FleetOption = None,
    url: Annotated[
        str | None, typer.Option(help="URL of a router elsewhere, such as http://host:8000.")
    ] = None,
    window: Annotated[
        str, typer.Option(help="Time limit; requests that are not done by then are abandoned.")
    ] = "24h",
    wait: Annotated[bool, typer.Option(help="Wait for the batch and download its results.")] = True,
) -> None:
    """Run a file of requests in OpenAI's batch format, one per line, with low priority.

    Results are written to FILE.output.jsonl, and to FILE.errors.jsonl if any request failed (exit
    code 1). The API key is read from OPENAI_API_KEY. Ctrl-C stops the waiting, not the batch.
    """
    with exits_on(httpx.InvalidURL, UnicodeError), client_of(fleet, url) as client:
        try:
            _run(client, file, window, wait=wait)
        except httpx.HTTPError as error:
            fail(f"{client.base_url}: {http_reason(error)}")


def _run(client: httpx.Client, file: str, window: str, *, wait: bool) -> None:
    path = Path(file)
    if file.startswith("batch_") and not path.exists():
        record = _json(client.get(f"/v1/batches/{file}"))
    else:
        record = _begin(client, path, window)
        typer.secho(f"started {record['id']}", err=True)
    if not wait:
        typer.echo(record["id"])
        return
    try:
        record = _ended(client, record)
    except KeyboardInterrupt:
        typer.secho(
            f"\nthe batch continues; wait for it with `baton batch {record['id']}`", err=True
        )
        raise typer.Exit(130) from None
    _fetch(client, record, path)
    for fault in (record["errors"] or {}).get("data", []):
        typer.secho(fault["message"], fg="red", err=True)
    if record["status"] != "completed" or record["request_counts"]["failed"]:
        raise typer.Exit(1)


def _begin(client: httpx.Client, path: Path, window: str) -> dict[str, Any]:
    """Upload the file and create a batch for the endpoint that its first line names."""
    try:
        with path.open("rb") as lines:
            first = json.loads(lines.readline(_MOST_LINE_BYTES).removeprefix(b"\xef\xbb\xbf"))
            lines.seek(0)
            sent = _json(
                client.post(
                    "/v1/files", files={"file": (path.name, lines)}, data={"purpose": "batch"}
                )
            )
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    except ValueError as error:
        fail(f"{path}: the first line is not JSON: {error}")
    body = {
        "input_file_id": sent["id"],
        "endpoint": first.get("url") if isinstance(first, dict) else None,
        "completion_window": window,
    }
    return _json(client.post("/v1/batches", json=body))


def _ended(client: httpx.Client, record: dict[str, Any]) -> dict[str, Any]:
    """Wait for the end of a batch while showing its progress, and return its record."""
    while record["status"] not in _ENDED:
        time.sleep(_POLL_S)
        record = _json(client.get(f"/v1/batches/{record['id']}"))
        typer.secho(f"\r{_progress(record)}", nl=False, err=True)
    typer.secho(f"\r{_progress(record)}", err=True)
    return record


def _progress(record: dict[str, Any]) -> str:
    counts = record["request_counts"]
    done = f"{counts['completed']} of {counts['total']} done, {counts['failed']} failed"
    return f"{record['status']}: {done}    "


def _fetch(client: httpx.Client, record: dict[str, Any], path: Path) -> None:
    for kind, file_id in (
        ("output", record["output_file_id"]),
        ("errors", record["error_file_id"]),
    ):
        if file_id is None:
            continue
        target = path.with_name(f"{path.name}.{kind}.jsonl")
        with (
            client.stream("GET", f"/v1/files/{file_id}/content") as answer,
            target.open("wb") as to,
        ):
            if not answer.is_success:
                answer.read()
                fail(answer_reason(answer))
            for piece in answer.iter_bytes():
                to.write(piece)
        typer.echo(str(target))


def _json(answer: httpx.Response) -> dict[str, Any]:
    """Return the object in a response, or exit with the router's error message."""
    try:
        body = printable_json(answer.json())
    except ValueError:
        body = None
    if not answer.is_success or not isinstance(body, dict):
        fail(answer_reason(answer))
    return dict(body)
