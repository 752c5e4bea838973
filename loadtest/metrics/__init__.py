"""Figures from records: per request, per run, and over several runs. Pure functions.

Tables show the formulas, since tools define ITL and TPOT differently.
"""
