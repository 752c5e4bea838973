"""How long hypothesis looks: seconds in `make test`, as long as is wanted in `make soak`."""

import os

from hypothesis import settings

FACTOR = int(os.environ.get("BATON_SOAK", "1"))

if FACTOR > 1:  # a failure that took hours must be replayable
    settings.register_profile("soak", print_blob=True)
    settings.load_profile("soak")


def examples(count: int) -> int:
    """So many schedules, and BATON_SOAK times as many when somebody has the time."""
    return count * FACTOR
