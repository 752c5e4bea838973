"""`python -m tests.hosts.rig`: a few hosts on this machine, to try what a cluster does."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from fleet.cli.common import fail
from tests.hosts.rig.cluster import ROOT, open_ssh, share_program, share_ray_token
from tests.hosts.rig.namespaces import Rig, RigError


def hosts(
    count: Annotated[int, typer.Option(min=1, max=32, help="How many.")] = 3,
    ssh: Annotated[
        bool, typer.Option("--ssh/--no-ssh", help="Run sshd on each; Debian's openssh-server.")
    ] = True,
    command: Annotated[
        list[str] | None, typer.Argument(help="What to run on the first. [bash]")
    ] = None,
) -> None:
    """Make hosts of this machine's namespaces, and open a shell on the first of them.

    Each has its own network, processes, /tmp, /opt and home; they are named h1, h2 … and see each
    other at 10.77.0.1, 10.77.0.2 …. The first enters the others by ssh. Needs root on Linux. With
    the shell's end all of it is gone.

    Example: `python -m tests.hosts.rig --count 3`, then what docs/guide/cluster.md says.
    """
    names = [f"h{number}" for number in range(1, count + 1)]
    with contextlib.ExitStack() as undo:
        try:
            rig = undo.enter_context(Rig(shared=[ROOT, Path.cwd()]))
            made = rig.add(*names)
            share_program(made)
            share_ray_token(made[:1])
            if ssh:
                open_ssh(made[0], made)
        except RigError as error:
            fail(str(error))
        shell = made[0].start(
            command or ["bash", "--noprofile", "--norc"],
            environment={"PS1": r"\h:\w\$ ", "TERM": "xterm"},
            folder=str(Path.cwd()),
        )
        code = shell.wait()
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(hosts)
