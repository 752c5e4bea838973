"""What the hand-off's benches draw, and what they say of a peer that is not there."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.kv import peers
from benchmarks.kv.overlap import Timeline
from benchmarks.kv.timeline import Group, draw
from kvtransfer.kv_slice import KvSlice


def test_exposed_is_from_the_last_group_computed_to_the_last_one_placed() -> None:
    timeline = Timeline()
    for layer, (computed_s, stored_s) in enumerate(((0.1, 0.35), (0.2, 0.3))):
        group = timeline.group(KvSlice(layer, 1, 0, 8, 0, 32, 512))
        group.computed_s, group.stored_s = computed_s, stored_s
    assert timeline.exposed_s == pytest.approx(0.15)
    same = timeline.group(KvSlice(1, 1, 0, 8, 16, 16, 256))
    assert same.computed_s == 0.2, "a piece of a chunk belongs to the chunk's group"


def test_the_picture_has_a_bar_for_each_span() -> None:
    groups = [Group(0.1, 0.11, 0.2), Group(0.2, 0.2, 0.3)]
    picture = ElementTree.fromstring(draw({"grpc": groups, "pair": groups}, 1024))
    bars = [e for e in picture.iter("{http://www.w3.org/2000/svg}rect") if e.get("height") == "2"]
    assert len(bars) == 2 * 2 * 3
    assert all(float(bar.get("width")) >= 0 for bar in bars)
    words = " ".join(e.text for e in picture.iter("{http://www.w3.org/2000/svg}text"))
    assert "100.0 ms exposed" in words


def test_a_peer_that_is_not_built_says_how_to(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    with pytest.raises(peers.PeerError, match="--build"):
        peers.rates(peers.ENGINES[0], 1 << 20, 1 << 20, 1)


def test_a_hand_off_goes_by_each_transport() -> None:
    """The bench stands where a worker's `Peers` does, and must know what a puller asks them."""
    asked = ["--rounds", "1", "--tokens", "512"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.handoff", *asked],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rates = dict(re.findall(r"^  (\S.*?) {2,}([\d.]+) GB/s", done.stdout, re.MULTILINE))
    assert {"shared_memory", "tcp", "pair", "grpc"} <= rates.keys(), done.stdout
    assert all(float(rate) > 0 for rate in rates.values())
