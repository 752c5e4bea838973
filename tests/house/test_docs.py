"""What docs and docstrings name is there: a moved file must not leave its old path behind."""

import re
import subprocess
from pathlib import Path

from tests.house.imports import PACKAGES, ROOT

_PATH = re.compile(
    rf"(?<![\w/.~-])((?:{'|'.join(PACKAGES)}|proto|docs|deploy|tests)/[\w/.*-]*\w(?:\.\w+)?)(?![\w-])"
)
_EXAMPLES = ("tests/FILE",)  # in a message to users


def test_every_path_that_is_named_exists() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    texts = [f for f in listed if f.endswith((".py", ".md", ".toml", ".yaml", ".cpp", ".proto"))]
    named, missing = 0, []
    for name in texts:
        for match in _PATH.finditer((ROOT / name).read_text(encoding="utf-8")):
            named += 1
            if not _there(match.group(1)):
                missing.append(f"{name}: {match.group(1)}")
    assert named > 200
    assert missing == []


def _there(path: str) -> bool:
    if "*" in path or path in _EXAMPLES:
        return True
    if path.startswith("baton/v1"):  # a package of protobuf
        return True
    return (ROOT / path).exists() or Path(f"{ROOT / path}.py").exists()


def test_every_test_that_the_page_on_reliability_names_exists() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 60
    gone = [
        f"{file}::{test}"
        for file, test in named
        if f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert gone == []
