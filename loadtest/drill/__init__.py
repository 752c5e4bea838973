"""Drills: inject one fault at a time into a local fleet under load, and judge the outcome.

drills.py   the drills, and the tolerated effects of each
faults.py   the faults: signals to processes of this machine, admin commands, traffic
fleet.py    state of the fleet: workers, blocks
measure.py  the rate that a fleet with latency limits holds
overload.py overload of such a fleet: phases and judgement (no I/O)
phases.py   load in phases of different rates, and their figures (no I/O)
runner.py   golden responses, load, fault, recovery
verdict.py  judgement from records and block counts (no I/O)
"""
