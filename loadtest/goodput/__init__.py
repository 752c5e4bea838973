"""Goodput of a fleet with latency limits (``slo``), at rates that the load tester chooses.

phases.py   load in phases of different rates, and their figures (no I/O)
fleet.py    a router's planner, sizes and orders
measure.py  sends phases, and finds the rate that a fleet holds
"""
