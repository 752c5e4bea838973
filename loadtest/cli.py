"""`baton loadtest`: load any OpenAI-compatible server.

``fleet/cli/main.py`` adds the app and sets its context to a function that finds the local fleet
(``loadtest.commands.options.FindFleet``), since nothing here imports ``fleet``.
"""

import typer

from loadtest.commands.compare import compare
from loadtest.commands.drill import drill
from loadtest.commands.running import ended_by_signals
from loadtest.commands.runs import agents, convert, poisson, replay, sessions
from loadtest.commands.search import search

app = typer.Typer(
    help="Load any OpenAI-compatible server and measure what its users experience.\n\nStart with "
    "`baton loadtest poisson --rate 2 --requests 100 --out /tmp/run`.",
    no_args_is_help=True,
)
for command in (replay, poisson, sessions, agents, convert, search, compare, drill):
    app.command()(ended_by_signals()(command))
