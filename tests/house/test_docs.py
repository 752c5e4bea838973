"""Docs are true where a program can check: paths, names, links, dates and length."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.house.imports import PACKAGES, ROOT

DOCS = ROOT / "docs"
MAX_WORDS = 4000
MAX_README_WORDS = 650
MAX_GUIDE_PAGE_WORDS = 1800
MAX_GUIDE_WORDS = 17_000
NO_LIMIT = ("docs/measurements", "docs/reference")

_PATH = re.compile(
    rf"(?<![\w/.~-])((?:{'|'.join(PACKAGES)}|proto|docs|deploy|tests)/[\w/.*-]*\w(?:\.\w+)?)(?![\w-])"
)
_EXAMPLES = ("tests/FILE",)  # in a message to users
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def _tracked(*endings: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [name for name in listed if name.endswith(endings) and (ROOT / name).exists()]


def _pages() -> list[str]:
    return [n for n in _tracked(".md") if n.startswith("docs/") or "/" not in n]


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _prose(name: str) -> str:
    """Return a page without its code blocks and code spans."""
    text = re.sub(r"```.*?```", "", _read(name), flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def _anchors(name: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", _read(name), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.strip().replace(" ", "-") for title in plain}


def test_every_path_that_is_named_exists() -> None:
    named = 0
    missing = []
    for name in _tracked(".py", ".md", ".toml", ".yaml", ".cpp", ".proto"):
        for match in _PATH.finditer(_read(name)):
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


def test_every_file_name_in_backquotes_exists() -> None:
    files = {Path(name).name for name in _tracked(".py")}
    missing = [
        f"{page}: {name}"
        for page in _pages()
        for name in re.findall(r"`(\w+\.py)`", _read(page))
        if name not in files and name != "config.py"  # a user's own
    ]
    assert missing == []


def test_every_link_leads_somewhere() -> None:
    broken = []
    followed = 0
    for page in _pages():
        for link in _LINK.findall(_prose(page)):
            if link.startswith(("http://", "https://")):
                continue
            followed += 1
            file, _, anchor = link.partition("#")
            target = (ROOT / page).parent / file if file else ROOT / page
            if not target.exists():
                broken.append(f"{page}: {link}")
            elif anchor and anchor not in _anchors(str(target.resolve().relative_to(ROOT))):
                broken.append(f"{page}: {link} (no such heading)")
    assert followed > 100
    assert broken == []


def test_every_page_is_linked_from_another() -> None:
    linked = {
        ((ROOT / page).parent / link.partition("#")[0]).resolve()
        for page in _pages()
        for link in _LINK.findall(_prose(page))
    }
    lonely = [page for page in _pages() if (ROOT / page).resolve() not in linked]
    assert lonely == ["README.md"]


def test_every_test_that_the_page_on_reliability_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)", _read("docs/design/reliability.md"))
    assert len(named) > 60
    gone = [
        f"{file}::{test}"
        for file, test in named
        if not re.search(rf"(def|class) {test}\b", _read(file))
    ]
    assert gone == []


def test_the_readme_is_short() -> None:
    assert len(_read("README.md").split()) <= MAX_README_WORDS


def test_the_guide_is_short() -> None:
    guide = [page for page in _pages() if page.startswith("docs/guide/")]
    words = {page: len(_read(page).split()) for page in guide}
    assert {page: n for page, n in words.items() if n > MAX_GUIDE_PAGE_WORDS} == {}
    assert sum(words.values()) <= MAX_GUIDE_WORDS, "link to the reference or the design instead"


@pytest.mark.parametrize("page", _pages())
def test_a_page_is_short_and_undated(page: str) -> None:
    if page.startswith(NO_LIMIT):
        return
    assert len(_read(page).split()) <= MAX_WORDS
    assert _DATE.findall(_read(page)) == [], "dates belong in docs/measurements"
