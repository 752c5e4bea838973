"""Two engines with disk tiers in one folder: what one has stored, the other one reads."""

from pathlib import Path

import pytest

from baton.engine.core.tiers.tiers import POOL
from baton.types.block_hashes import tag_in
from tests.engine.core.test_tiers import GONE, SEED, Engine, fill, golden, prompt_of


def two(folder: Path, blocks: int = 20, places: int = 96) -> tuple[Engine, Engine]:
    """The first one has stored prompts 0 to 5, and the second one knows."""
    engines = [Engine(blocks, places, folder=folder / name) for name in ("decode-0", "decode-1")]
    a, b = engines
    fill(a)
    b.look()
    return a, b


def files(folder: Path, worker: str = "decode-0") -> list[Path]:
    return sorted(folder.glob(f"{worker}/*/*.kv"))


def ask(engine: Engine, number: int, name: str = "asked") -> dict[str, int]:
    """Answer a prompt, check its tokens, and return what came from tiers."""
    engine.submit(name, prompt_of(number))
    engine.run()
    assert engine.answer(name) == golden(prompt_of(number))
    engine.baseline()
    return engine.end(name).tier_tokens


def test_what_one_has_stored_the_other_reads_and_does_not_store_again(tmp_path: Path) -> None:
    _, b = two(tmp_path)
    stored = len(files(tmp_path))
    assert stored > 18
    assert b.counts().elsewhere == stored
    assert b.counts().held == 0
    assert ask(b, 0) == {"memory": 96}
    for number in range(10, 16):
        b.submit(f"own-{number}", prompt_of(number))
        b.run()
    own = {path.name for path in files(tmp_path, "decode-1")}
    assert own
    assert not own & {path.name for path in files(tmp_path)}


def test_the_index_is_told_of_blocks_elsewhere_and_of_their_end(tmp_path: Path) -> None:
    _, b = two(tmp_path)
    b.step()
    there = {bytes.fromhex(path.stem) for path in files(tmp_path)}
    assert b.held["memory"] == there
    for path in files(tmp_path)[:5]:
        path.unlink()
        there.remove(bytes.fromhex(path.stem))
    b.look()
    b.step()
    assert b.held["memory"] == there


@pytest.mark.parametrize("fault", ["damaged", "cut", "foreign", "gone"])
def test_a_file_that_is_not_the_block_is_a_miss_which_is_counted_once(
    tmp_path: Path, fault: str
) -> None:
    _, b = two(tmp_path)
    for path in files(tmp_path):
        raw = path.read_bytes()
        if fault == "damaged":
            path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        elif fault == "cut":
            path.write_bytes(raw[:-8])
        elif fault == "foreign":
            path.write_bytes(b"a photo")
        else:
            path.unlink()
    assert ask(b, 0) == {}
    counted = b.counts().gone if fault == "gone" else b.counts().damaged
    assert counted == 6
    assert b.counts().gone + b.counts().damaged == 6
    b.core.drop_cached()
    b.look()
    assert ask(b, 0, "again") == {}
    assert b.counts().gone + b.counts().damaged == 6, "nothing is read a second time"


def test_an_owner_evicts_while_another_reads(tmp_path: Path) -> None:
    a, b = two(tmp_path, places=36)
    b.submit("asked", prompt_of(0))
    b.step()
    ordered = [copy for copy in b.pending if copy.target == POOL]
    assert len(ordered) == 6
    for number in range(10, 16):
        a.submit(f"more-{number}", prompt_of(number))
        a.run()
    b.run()
    assert b.answer("asked") == golden(prompt_of(0))
    assert b.counts().gone == 6
    assert len(files(tmp_path)) <= 36
    b.baseline()


def test_what_appears_while_it_is_written_is_stored_by_both_and_lost_by_none(
    tmp_path: Path,
) -> None:
    """Neither knows of the other's blocks until it looks."""
    folder = tmp_path
    a, b = (Engine(20, 96, folder=folder / name) for name in ("decode-0", "decode-1"))
    fill(a)
    fill(b)
    both = {path.name for path in files(folder)} & {path.name for path in files(folder, "decode-1")}
    assert both
    a.look()
    b.look()
    for path in files(folder, "decode-1"):
        path.unlink()
    a.look()
    assert ask(a, 0) == {"memory": 96}, "its own"
    assert a.counts().elsewhere == 0


def test_an_erased_tenant_is_erased_in_the_folders_of_workers_that_have_ended(
    tmp_path: Path,
) -> None:
    a, b = two(tmp_path)
    for number in range(4):
        a.submit(f"gone-{number}", prompt_of(number), seed=GONE)
        a.run()
    fill(a)  # evicts them from the pool
    b.look()
    tags = [tag_in(bytes.fromhex(path.stem)) for path in files(tmp_path)]
    assert tag_in(GONE) in tags
    assert tag_in(SEED) in tags
    b.forget()
    b.run()
    left = {tag_in(bytes.fromhex(path.stem)) for path in files(tmp_path)}
    assert left == {tag_in(SEED)}
    a.submit("late", prompt_of(7), seed=GONE)
    a.run()
    b.look()
    b.step()
    assert not any(tag_in(name) == tag_in(GONE) for name in b.held["memory"])
