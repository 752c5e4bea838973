"""Sends a plan to a server and writes down what came, and when.

    processes.py  ─▶  __main__.py (a process each)  ─▶  runner.py  ─▶  exchange.py  ─▶  answer.py
    starts clients    pipes in and out                  keeps time     one connection   reads bytes

Clients are processes of their own, also where there is one: what the terminal draws cannot delay
what is measured.
"""
