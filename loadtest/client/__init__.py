"""Client of a load test: sends a plan to a server, and records what it receives and when.

    processes.py  ─▶  __main__.py (a process each)  ─▶  runner.py  ─▶  exchange.py  ─▶  answer.py
    starts clients    pipes in and out                  keeps time     one connection   reads bytes

Clients always run in processes of their own, so that drawing on the terminal cannot delay
measurements.
"""
