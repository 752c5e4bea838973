"""Regenerate ``proto/batonpb`` from ``proto/baton/v1``: ``python proto/build.py [--check]``.

``--check`` writes nothing and exits 1 when the committed code differs from what would be made.
"""

import filecmp
import re
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).parent
PACKAGE = ROOT / "batonpb"


def generate(into: Path) -> None:
    """Write the generated modules, flat, into the folder ``into``."""
    sources = sorted((ROOT / "baton" / "v1").glob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{ROOT}", f"-I{well_known}"]
        arguments += [f"--python_out={scratch}", f"--pyi_out={scratch}"]
        arguments += [f"--grpc_python_out={scratch}", *map(str, sources)]
        if protoc.main(arguments):
            raise SystemExit("protoc failed")
        for made in sorted((Path(scratch) / "baton" / "v1").iterdir()):
            # The package is called batonpb because proto-plus owns the import name "proto".
            text = re.sub(r"from baton\.v1 import", "from batonpb import", made.read_text())
            if made.name.endswith("_grpc.py") and "def add_" not in text:
                continue  # a file without services
            (into / made.name).write_text(text)


def main() -> None:
    """Write the package, or compare it with what would be written."""
    if "--check" not in sys.argv:
        generate(PACKAGE)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        names = [path.name for path in Path(scratch).iterdir()]
        _, different, missing = filecmp.cmpfiles(scratch, PACKAGE, names, shallow=False)
        if different or missing:
            raise SystemExit(f"proto/batonpb is stale ({different + missing}): run `make proto`")


if __name__ == "__main__":
    main()
