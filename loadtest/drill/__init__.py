"""Drills: inject one fault at a time into a local fleet under load, and judge the outcome.

drills.py   the drills, and the tolerated effects of each
faults.py   the faults: signals to processes of this machine, network rules, admin commands, traffic
fleet.py    state of the fleet: workers, blocks
overload.py overload of such a fleet: phases and judgement (no I/O)
phases.py   load in phases of different rates, and their figures (no I/O)
runner.py   golden responses, load, fault, recovery; the rate that a fleet with limits holds
verdict.py  judgement from records and block counts (no I/O)
"""
