"""Every way to sum that this machine has, whatever it would choose by itself."""

from baton.engine.cpu.native.library import PAIRS, TILES, load, why_no_amx

WAYS = {"vdp": PAIRS, "emulate": TILES["emulate"], "software": TILES["software"]}
if load() is not None and not why_no_amx():
    WAYS["amx"] = TILES["amx"]

OF_TILES = [way for way in WAYS if way != "vdp"]
