"""Entry point of the `baton` script, with a name that no other project has.

A folder on PYTHONPATH that is named like one of our packages would be imported in its place, here
and in child processes. Then our own folder goes first; otherwise the path stays as it is.
"""

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).parent
_PACKAGES = (
    *("baton", "batonpb", "router", "prefill_worker", "decode_worker", "kvtransfer", "fleet"),
    "loadtest",
)


def _hides_ours(folder: str) -> bool:
    place = Path(folder)
    names = (f"{name}{end}" for name in _PACKAGES for end in ("", ".py"))
    return place.resolve() != _ROOT and any((place / name).exists() for name in names)


def main() -> None:
    """Run a command of Baton."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if any(_hides_ours(folder) for folder in given if folder):
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *given])
        sys.path.insert(0, str(_ROOT))
    from fleet.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
