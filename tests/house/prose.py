"""Count what is not plain English yet: ``python -m tests.house.prose [--list] [--words] [PATH …]``.

openers     docstrings that open with a question word or ``of as for from by one``
fragments   texts of arguments, options and fields that open with a question word or a preposition
            ("Of the pool.", "As it came."), and so need another text; "Whether …" is usual
short       docstrings of three words or fewer
words       house words (`WORDS`) in docstrings, help, log lines, metric texts, errors and pages

Without PATH: the product's packages and pages. Names in backquotes are not read.
"""

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.house.imports import PACKAGES, ROOT

QUESTIONS = {
    "what", "who", "whom", "whose", "how", "whether", "where", "when", "that", "which", "why",
}  # fmt: skip
OPENERS = QUESTIONS | {"of", "as", "for", "from", "by", "one"}
PREPOSITIONS = {
    "of", "as", "for", "from", "by", "at", "on", "with", "between", "until", "till", "behind",
    "below", "above", "after", "before", "under", "into", "over", "within", "without",
    "beside", "among", "against", "per", "so", "if", "since", "because", "through", "like",
    "than",
}  # fmt: skip
FRAGMENTS = (QUESTIONS - {"whether", "when"}) | PREPOSITIONS
SHORT_WORDS = 3

# Programs do not say, hear, believe, want or live; they have names; one thing has one word.
WORDS = re.compile(
    r"\b(says?|said|saying|hears?|heard|hearing|tells?|told|telling|believe[sd]?|wants?|wished|wishes"
    r"|lives|lived|owe[sd]?|knows|nobody|somebody|everybody|anybody|whoever|whom|who"
    r"|go(?:es)? on|going on|went on|dies? of|died of|be it|luck\w*"
    r"|guess\w*|mirror\w*|claim(?:s|ed|ing)?|givers?|story|stories|(?:router|fleet)'s word)\b",
    re.IGNORECASE,
)
# Where such a word is the usual one: people, terms, quoted prompts.
ALLOWED = (
    "tell apart", "tells apart", "told apart", "tell them apart", "users who", "operators who",
    "people who", "user who", "operator who", "anyone who", "mirror of PyPI", "old too does tell",
    "a story, temperature", "the claim", "Claim with", "this claim", "token's claim", "a claim",
)  # fmt: skip

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note):$")
_ARGUMENT = re.compile(r"^    \*{0,2}\w+(?: \([^)]*\))?: (.*)$")
_NAME = re.compile(r"^ +\*{0,2}\w+(?: \([^)]*\))?: ", re.MULTILINE)  # of an argument
_CODE = re.compile(r"``.*?``|`[^`\n]*`|https?://\S+", re.DOTALL)
_LOGS = frozenset(("debug", "info", "warning", "error", "exception", "critical", "log"))


class Text(NamedTuple):
    """Text that people read, and where it stands."""

    path: str
    line: int
    kind: str  # docstring, argument (of a docstring), field, help, log, error, metric, text or page
    text: str


def roots() -> list[Path]:
    """Return the product's packages and pages that exist."""
    names = (*PACKAGES, "benchmarks", "README.md", "CONTRIBUTING.md", "docs")
    return [ROOT / name for name in dict.fromkeys(names) if (ROOT / name).exists()]


def texts(paths: Iterable[Path]) -> Iterator[Text]:
    """Yield every text in Python files and Markdown pages below ``paths``."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
            if file.suffix == ".py":
                yield from _Reader(name, file.read_text(encoding="utf-8")).texts()
            elif file.suffix == ".md":
                yield from _page(name, file.read_text(encoding="utf-8"))


class _Reader:
    """Reads one Python file."""

    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._tree = ast.parse(source)
        self._parents = {
            child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)
        }

    def texts(self) -> Iterator[Text]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "X" for p in node.values]
                yield self._string(node, "".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parent = self._parents[node]
                if isinstance(parent, (ast.JoinedStr, ast.FormattedValue)):
                    continue
                if isinstance(parent, ast.Expr):
                    yield from self._documentation(node, parent, node.value)
                elif " " in node.value.strip():
                    yield self._string(node, node.value)

    def _documentation(self, node: ast.Constant, parent: ast.Expr, text: str) -> Iterator[Text]:
        owner = self._parents[parent]
        scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        first = isinstance(owner, scopes) and owner.body[0] is parent
        if not first:
            yield Text(self._path, node.lineno, "field", text)
            return
        yield Text(self._path, node.lineno, "docstring", text)
        section = ""
        margin = " " * node.col_offset
        for offset, raw in enumerate(text.splitlines()):
            line = raw.removeprefix(margin)
            if found := _SECTION.match(line):
                section = found[1]
            elif line and not line.startswith(" "):
                section = ""
            elif section in ("Args", "Attributes") and (argument := _ARGUMENT.match(line)):
                yield Text(self._path, node.lineno + offset, "argument", argument[1])

    def _string(self, node: ast.expr, text: str) -> Text:
        return Text(self._path, node.lineno, self._kind(node), text)

    def _kind(self, node: ast.AST) -> str:
        if self._path.endswith("metric_names.py"):
            return "metric"
        while not isinstance(node, ast.stmt):
            child = node
            node = self._parents[node]
            if isinstance(node, ast.keyword) and node.arg in ("help", "description"):
                return "help"
            if isinstance(node, ast.Call) and child is not node.func:
                called = ast.unparse(node.func)
                if called.rpartition(".")[2] in _LOGS:
                    return "log"
                if called.endswith("Error"):
                    return "error"
        return "error" if isinstance(node, ast.Raise) else "text"


def _page(name: str, source: str) -> Iterator[Text]:
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif line.strip() and not in_code:
            yield Text(name, number, "page", line)


def first_word(text: str) -> str:
    """Return the first word in lower case, without marks."""
    found = re.match(r"[\s(\"'*]*([\w']+)", text)
    return found[1].lower() if found else ""


def opens_badly(text: Text) -> bool:
    """Whether a docstring's first line is neither an imperative nor a noun phrase with its noun."""
    return text.kind == "docstring" and first_word(text.text) in OPENERS


def is_fragment(text: Text) -> bool:
    """Whether the text of an argument cannot stand alone."""
    return text.kind in ("argument", "help", "field") and first_word(text.text) in FRAGMENTS


def is_short(text: Text) -> bool:
    """Whether a docstring has three words or fewer."""
    return text.kind == "docstring" and len(text.text.split()) <= SHORT_WORDS


def house_words(text: Text) -> list[tuple[int, str]]:
    """Return line and word of each house word. An argument's text is part of its docstring."""
    if text.kind == "argument":
        return []
    plain = _CODE.sub(lambda found: re.sub(r"[^\n]", "_", found[0]), text.text)
    plain = _NAME.sub("", plain)
    for phrase in ALLOWED:
        plain = plain.replace(phrase, "")
    return [
        (text.line + offset, found.lower())
        for offset, line in enumerate(plain.splitlines())
        for found in WORDS.findall(line)
    ]


CHECKS = {"openers": opens_badly, "fragments": is_fragment, "short": is_short}


def counted(found: Iterable[Text]) -> Counter[str]:
    """Return how many texts there are of each kind, and how many offenders of each sort."""
    counts: Counter[str] = Counter()
    for text in found:
        counts[text.kind] += 1
        counts["words"] += len(house_words(text))
        for name, check in CHECKS.items():
            counts[name] += check(text)
    return counts


def group_of(text: Text) -> str:
    """Return the package that a text belongs to; in the large ones the folder below it."""
    parts = text.path.split("/")
    depth = 2 if parts[0] in ("baton", "router") and len(parts) > 2 else 1
    return "/".join(parts[:depth])


def _print_counts(found: list[Text]) -> None:
    groups: dict[str, list[Text]] = defaultdict(list)
    for text in found:
        groups[group_of(text)].append(text)
    print(
        f"{'':24}{'docstrings':>12}{'openers':>10}{'':8}{'fragments':>10}{'short':>8}{'words':>8}"
    )
    for name, own in [*sorted(groups.items()), ("all", found)]:
        counts = counted(own)
        share = counts["openers"] / max(counts["docstring"], 1)
        print(
            f"{name:24}{counts['docstring']:12}{counts['openers']:10}{100 * share:6.1f} %"
            f"{counts['fragments']:10}{counts['short']:8}{counts['words']:8}"
        )


def _print_offenders(found: Iterable[Text], *, words: bool) -> None:
    for text in found:
        if words:
            lines = text.text.splitlines()
            for line, word in house_words(text):
                shown = lines[line - text.line].strip()
                print(f"{text.path}:{line}: {text.kind}: {word}: {shown}")
            continue
        for name, check in CHECKS.items():
            if check(text):
                first = text.text.strip().splitlines()[0]
                print(f"{text.path}:{text.line}: {name}: {first}")


def main() -> int:
    """Print the counts by package, and the offenders with ``--list``."""
    parser = argparse.ArgumentParser(description="Count what is not plain English yet.")
    parser.add_argument("paths", nargs="*", type=Path, help="Files or folders to read.")
    parser.add_argument("--list", action="store_true", help="Print each offender, one a line.")
    parser.add_argument("--words", action="store_true", help="Print each house word, one a line.")
    options = parser.parse_args()
    paths = [path.resolve() for path in options.paths] or roots()
    found = list(texts(paths))
    if options.list or options.words:
        _print_offenders(found, words=options.words)
    _print_counts(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
