"""`make bench`: every bench of this folder, one after the other."""

import typer

from benchmarks.engine import main

if __name__ == "__main__":
    typer.run(main)
