"""File of golden prompts: one JSON object a line, see `baton.types.gates.GoldenPrompt`."""

from pathlib import Path

import msgspec

from baton.folders import read_small
from baton.types.gates import MAX_GOLDEN, GoldenPrompt


class GoldenFileError(ValueError):
    """Unusable file; the message is complete and meant for the user."""


class _Line(GoldenPrompt, frozen=True, forbid_unknown_fields=True):
    """Line of a file, in which a misspelt key must not pass for a missing one."""


def read_golden(path: str | Path) -> tuple[GoldenPrompt, ...]:
    """Read a file of golden prompts. Empty lines are skipped.

    Raises:
        GoldenFileError: The file cannot be read, or a line is invalid; the message names it.
    """
    try:
        text = read_small(Path(path).expanduser()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise GoldenFileError(f"{path}: cannot read golden prompts: {error}") from error
    found: dict[str, GoldenPrompt] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            made = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise GoldenFileError(f"{path}:{number}: {error}") from error
        if made.name in found:
            raise GoldenFileError(f"{path}:{number}: the name {made.name!r} is used twice")
        found[made.name] = GoldenPrompt(**msgspec.structs.asdict(made))
    if not 1 <= len(found) <= MAX_GOLDEN:
        raise GoldenFileError(f"{path}: has {len(found)} prompts; use 1 to {MAX_GOLDEN}")
    return tuple(found.values())
