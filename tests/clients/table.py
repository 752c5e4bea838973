"""Run every client, write the table in ``docs``: ``python -m tests.clients.table``."""

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

from tests.clients.environments import CLIENTS, Client, NoEnvironmentError, version
from tests.clients.run import Result, run
from tests.clients.server import serving

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "2026-11.md"
BEGIN, END = "<!-- table: python -m tests.clients.table -->", "<!-- end of the table -->"


async def measured() -> str:
    """The table of all clients, each against a router of its own."""
    rows = []
    for client in CLIENTS:
        async with serving() as url:
            try:
                found = await run(client, url)
                row = _row(client, found)
            except (NoEnvironmentError, RuntimeError) as error:
                row = f"| {client.title} | | | not run: {str(error).splitlines()[0]} |"
        sys.stderr.write(f"{row}\n")
        rows.append(row)
    return table(rows, datetime.now(UTC).date().isoformat())


def table(rows: list[str], date: str) -> str:
    """The rows under their head, with the date."""
    head = "| client | version | works | fails |\n|---|---|---|---|"
    return f"Run on {date}.\n\n{head}\n" + "\n".join(rows)


def _row(client: Client, found: list[Result]) -> str:
    def of(kind: str) -> str:
        return ", ".join(result.scenario for result in found if result.result == kind)

    return f"| {client.title} | {version(client)} | {of('works')} | {of('fails')} |"


def written(page: str, text: str) -> str:
    """The page with ``text`` where the table was."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), asyncio.run(measured())))
