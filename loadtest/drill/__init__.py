"""Drills: one fault at a time on a local fleet under load, and a verdict.

drills.py   which faults there are, what each may cost
faults.py   how each is done: signals to processes of this machine, orders, traffic
fleet.py    what is asked of the fleet: workers, blocks
runner.py   golden answers, load, fault, recovery
verdict.py  the judgement, from records and block counts (pure)
"""
