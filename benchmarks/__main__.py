"""`make bench`: the engine beside a dense program."""

import typer

from benchmarks.engine import main

if __name__ == "__main__":
    typer.run(main)
