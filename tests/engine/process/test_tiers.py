"""What lies on a tier's shelf: whole, or not given out at all; and a step loop that uses both."""

import asyncio
import errno
import os
from types import SimpleNamespace

import numpy as np
import pytest

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.core.tiers.tiers import POOL, TierCopy
from baton.engine.process import messages, tier_shelves
from baton.engine.process.build import _format_key
from baton.engine.process.client import EngineClient
from baton.engine.process.tier_copier import TierCopier
from baton.engine.process.tier_shelves import DamagedError, DiskShelf, MemoryShelf, ShelfError
from baton.engine.settings import EngineSettings, KvTierSettings
from baton.types import events as ev
from baton.types.geometry import KvGeometry
from baton.types.params import SamplingParams

HASH = bytes(range(16))
OTHER = bytes(range(16, 32))
BLOCK = np.arange(4096, dtype=np.uint8)
MODEL = "0" * 32


def disk(folder, key=MODEL, places=4) -> DiskShelf:
    return DiskShelf(folder, key, places, len(BLOCK))


def the_file(folder):
    (path,) = (folder / MODEL).glob("*.kv")
    return path


def test_a_shelf_that_is_closed_can_be_had_again_by_this_process_too(tmp_path):
    first = disk(tmp_path)
    with pytest.raises(ShelfError, match="in use by another process"):
        disk(tmp_path)
    first.close()
    disk(tmp_path).close()


def test_folders_that_are_no_tiers_are_left_alone(tmp_path):
    (tmp_path / MODEL).mkdir()
    (tmp_path / "photos").mkdir()
    disk(tmp_path, key="f" * 32).close()
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "f" * 32, "lock"}


def test_blocks_that_came_as_int8_are_no_others():
    geometry = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=8, dtype="bf16")
    info = SimpleNamespace(weights_digest=b"w", numerics_id="fast")
    keys = {_format_key(geometry, info, KvTierSettings(int8_chunks=int8)) for int8 in (True, False)}
    assert len(keys) == 2


def test_a_block_comes_back_as_it_was(tmp_path):
    for shelf in (MemoryShelf(4, len(BLOCK)), disk(tmp_path)):
        shelf.write(2, HASH, BLOCK)
        assert (shelf.read(2, HASH) == BLOCK).all()
        with pytest.raises(DamagedError):
            shelf.read(2, OTHER)


def test_blocks_of_a_tag_are_erased_and_others_stay(tmp_path):
    tags = frozenset([HASH[-4:]])
    memory = MemoryShelf(4, len(BLOCK))
    for shelf in (memory, disk(tmp_path)):
        shelf.write(1, HASH, BLOCK)
        shelf.write(2, OTHER, BLOCK)
        assert shelf.erase(tags) == 1
        assert shelf.erase(tags) == 0
        with pytest.raises(DamagedError):
            shelf.read(1, HASH)
        assert (shelf.read(2, OTHER) == BLOCK).all()
    assert not memory._blocks[1].any()
    assert the_file(tmp_path).stem == OTHER.hex()


def test_nobody_else_can_read_what_is_on_disk(tmp_path):
    (tmp_path / MODEL).mkdir(mode=0o777)  # a former life's, of an older version
    disk(tmp_path).write(0, HASH, BLOCK)
    assert (tmp_path / MODEL).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["flip", "flip header", "cut", "longer", "gone", "other's"])
def test_damage_on_disk_is_noticed(tmp_path, damage):
    shelf = disk(tmp_path)
    shelf.write(0, HASH, BLOCK)
    path = the_file(tmp_path)
    raw = bytearray(path.read_bytes())
    if damage.startswith("flip"):
        raw[3 if "header" in damage else 1000] ^= 4
    elif damage == "cut":
        raw = raw[:2000]
    elif damage == "longer":
        raw += b"x"
    path.write_bytes(raw)
    wanted = HASH
    if damage == "gone":
        path.unlink()
    elif damage == "other's":
        wanted = OTHER
        path.rename(path.with_name(OTHER.hex() + ".kv"))
    if damage == "longer":  # its bytes are all there
        assert (shelf.read(0, wanted) == BLOCK).all()
        return
    with pytest.raises(DamagedError):
        shelf.read(0, wanted)


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    shelf = disk(tmp_path)
    real = os.write

    def full(descriptor, data):
        if len(data) < 1000:
            return real(descriptor, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tier_shelves.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        shelf.write(0, HASH, BLOCK)
    assert list((tmp_path / MODEL).iterdir()) == []


def test_a_place_that_is_taken_again_deletes_its_file(tmp_path):
    shelf = disk(tmp_path)
    shelf.write(0, HASH, BLOCK)
    shelf.write(0, OTHER, BLOCK)
    assert the_file(tmp_path).stem == OTHER.hex()


def test_the_next_life_finds_what_is_whole_and_deletes_the_rest(tmp_path):
    first = disk(tmp_path)
    first.write(0, HASH, BLOCK)
    first.write(1, OTHER, BLOCK)
    first.close()
    folder = tmp_path / MODEL
    (folder / f"{OTHER.hex()}.kv").write_bytes(b"short")
    (folder / "half.new").write_bytes(b"x")
    second = disk(tmp_path)
    assert second.found == [(HASH, 0)]
    assert (second.read(0, HASH) == BLOCK).all()
    assert len(list(folder.iterdir())) == 1
    second.close()
    assert disk(tmp_path, key="f" * 32).found == []
    assert not folder.exists()


def test_files_of_others_in_its_folder_are_left_alone(tmp_path):
    first = disk(tmp_path)
    first.write(0, HASH, BLOCK)
    first.close()
    whole = the_file(tmp_path)
    folder = whole.parent
    (folder / ("x" * 32 + whole.suffix)).write_bytes(whole.read_bytes())
    (folder / "notes.txt").write_text("mine")
    (folder / "photos.kv").mkdir()
    assert disk(tmp_path).found == [(HASH, 0)]
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "photos.kv").is_dir()


def test_a_smaller_tier_keeps_the_youngest(tmp_path):
    first = disk(tmp_path)
    for place in range(4):
        first.write(place, bytes([place]) * 16, BLOCK)
        os.utime(tmp_path / MODEL / f"{(bytes([place]) * 16).hex()}.kv", (place, place))
    first.close()
    assert [name[0] for name, _ in disk(tmp_path, places=2).found] == [2, 3]


def test_two_processes_do_not_share_a_folder(tmp_path):
    disk(tmp_path)
    with pytest.raises(ShelfError, match="another process"):
        disk(tmp_path)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShelfError):
        disk(tmp_path / "file")


# ------------------------------------------------------------------- a step loop with tiers


class Asked:
    """An engine process that answers one prompt after the other."""

    def __init__(self, client: EngineClient) -> None:
        self.client, self.count = client, 0
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, asyncio.Future] = {}
        self.load = ev.StepDone()
        client.listen(self._hear)

    def _hear(self, report) -> None:
        if isinstance(report, ev.Tokens):
            answer = self.tokens.setdefault(report.request_id, [])
            answer += [token.token for token in report.tokens]
        elif isinstance(report, ev.Ended):
            self.ends[report.request_id].set_result(report)
        elif isinstance(report, ev.StepDone):
            self.load = report

    async def ask(self, number: int) -> tuple[list[int], ev.Ended]:
        self.count += 1
        name = f"r{self.count}"
        self.ends[name] = asyncio.get_running_loop().create_future()
        prompt = np.array([(number * 31 + i) % 200 for i in range(100)], "<u4").tobytes()
        params = SamplingParams(max_tokens=4, temperature=0.0)
        spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=b"s" * 16, ticket=self.count)
        self.client.send(messages.Submit(request_id=name, prompt_token_ids=prompt, spec=spec))
        end = await asyncio.wait_for(self.ends[name], 60)
        return self.tokens[name], end


async def test_blocks_come_back_from_memory_from_disk_and_after_a_restart(tmp_path):
    tiers = KvTierSettings(memory_mb=1, disk_mb=1, disk_folder=str(tmp_path / "w"))
    # 12 blocks in the pool; memory and disk have room for all
    settings = EngineSettings(
        model="emulated", kv_blocks=12, kv_tiers=tiers, check_every_step=True, kv_dtype="fp32"
    )
    client = await EngineClient.start(settings)
    asked = Asked(client)
    first = [(await asked.ask(number))[0] for number in range(4)]
    again: list[tuple[list[int], ev.Ended]] = []
    rounds = 0  # as below: a busy host saves late
    while not again or (any(not end.tier_tokens for _, end in again[:2]) and rounds < 100):
        again, rounds = [await asked.ask(number) for number in range(4)], rounds + 1
        assert [tokens for tokens, _ in again] == first
    assert all(end.tier_tokens.get("memory", 0) > 0 for _, end in again[:2])
    assert {tier.name for tier in asked.load.tiers} == {"memory", "disk"}
    assert await client.stop() == 0

    # memory too small for one block: all goes to disk, and the next life finds it there
    only_disk = KvTierSettings(disk_mb=1, disk_folder=str(tmp_path / "w"))
    settings = EngineSettings(
        model="emulated", kv_blocks=12, kv_tiers=only_disk, check_every_step=True, kv_dtype="fp32"
    )
    for life in range(2):
        client = await EngineClient.start(settings)
        asked = Asked(client)
        answers = [await asked.ask(number) for number in range(4)]
        assert [tokens for tokens, _ in answers] == first
        if life:
            assert any(end.tier_tokens.get("disk", 0) for _, end in answers)
        rounds = 0  # a busy host saves late, and a process that ends saves nothing more
        while not any(end.tier_tokens for _, end in answers) and rounds < 100:
            answers, rounds = [await asked.ask(number) for number in range(4)], rounds + 1
        assert await client.stop() == 0


async def test_a_folder_that_cannot_be_used_costs_the_tier_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    said: list[str] = []
    tiers = KvTierSettings(disk_mb=1, disk_folder=str(tmp_path / "file" / "w"))
    settings = EngineSettings(model="emulated", kv_blocks=12, kv_tiers=tiers)
    client = await EngineClient.start(settings, on_progress=said.append)
    assert len((await Asked(client).ask(1))[0]) == 4
    assert any("disk KV tier disabled" in line for line in said)
    assert await client.stop() == 0


def test_a_copy_that_ends_in_whatever_way_does_not_end_the_copies_after_it():
    """Any exception but two ended the thread, and with it the admission of the whole worker."""
    moved = []

    def move(copy: TierCopy) -> str:
        moved.append(copy.number)
        if copy.number == 1:
            raise ValueError("a surprise")
        return "done"

    copier = TierCopier(SimpleNamespace(move=move, close=lambda: None))
    copies = [TierCopy(number, HASH, POOL, number, "memory", number) for number in (1, 2)]
    copier.order(copies)
    ended = []
    while len(ended) < 2:
        ended += copier.take()
    copier.close()
    assert {one.number: one.outcome for one in ended} == {1: "failed", 2: "done"}
