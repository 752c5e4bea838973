"""Drills: inject one fault at a time into a local fleet under load, and judge the outcome.

drills.py   the drills, and the tolerated effects of each
faults.py   the faults: signals to processes of this machine, admin commands, traffic
fleet.py    state of the fleet: workers, blocks
overload.py overload of a fleet with latency limits: phases and judgement
runner.py   golden responses, load, fault, recovery
verdict.py  judgement from records and block counts (no I/O)
"""
