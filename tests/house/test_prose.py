"""What people read is plain English: the counts of `tests.house.prose` only fall."""

from pathlib import Path

import pytest

from tests.house import prose

# Openers in % of the docstrings; the others are numbers of places.
LIMITS = {"openers": 2.0, "fragments": 20, "short": 20, "words": 20}


def test_the_counts_are_within_their_limits() -> None:
    counts: dict[str, float] = dict(prose.counted(prose.texts(prose.roots())))
    assert counts["docstring"] > 1000
    counts["openers"] *= 100 / counts["docstring"]
    over = {name: counts[name] for name, limit in LIMITS.items() if counts[name] > limit}
    assert over == {}, "python -m tests.house.prose --list, or --words, shows them"


def _of(tmp_path: Path, source: str) -> dict[str, int]:
    file = tmp_path / "module.py"
    file.write_text(source, encoding="utf-8")
    return dict(prose.counted(prose.texts([file])))


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("What a worker holds in its pool.", "openers"),
        ("Of all the workers here.", "openers"),
        ("For JSON.", "short"),
        ("Return the text, which nobody reads.", "words"),
        ("Return the pool.\n\n    Args:\n        a: Of the pool.\n    ", "fragments"),
    ],
)
def test_offenders_are_found(tmp_path: Path, docstring: str, found: str) -> None:
    source = f'def f(a):\n    """{docstring}"""\n'
    assert _of(tmp_path, source)[found] == 1


def test_plain_texts_are_not_counted(tmp_path: Path) -> None:
    source = '''"""Blocks of the pool, and ``who`` holds them."""

def f(a: int, b: bool) -> None:
    """Return the request's blocks.

    Args:
        a: Number of blocks.
        b: Whether the last block may be partial.
    """
    _LOG.warning("worker %s cannot be told apart from %s", a, b)
'''
    counts = _of(tmp_path, source)
    assert {name: counts[name] for name in prose.CHECKS} == dict.fromkeys(prose.CHECKS, 0)
    assert counts["words"] == 0
    assert (counts["argument"], counts["log"]) == (2, 1)


def test_words_are_found_wherever_people_read(tmp_path: Path) -> None:
    source = """import typer

SEED = typer.Option(help="Seed; nobody needs it.")

def f(a: int) -> None:
    _LOG.info("the worker goes on with %s", a)
    raise ValueError(f"{a} is what the worker believes")
"""
    file = tmp_path / "module.py"
    file.write_text(source, encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("A giver.\n\n```\nA giver.\n```\n", encoding="utf-8")
    found = [
        (text.kind, word)
        for text in prose.texts([file, page])
        for _, word in prose.house_words(text)
    ]
    assert sorted(found) == [
        ("error", "believes"),
        ("help", "nobody"),
        ("log", "goes on"),
        ("page", "giver"),
    ]
