"""Figures from records: of one request, of a run, over several runs. Pure functions.

Formulas are printed with every table, since tools disagree on what ITL and TPOT mean.
"""
