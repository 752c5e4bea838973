"""How long hypothesis looks: seconds in `make test`, as long as is wanted in `make soak`."""

import os

from hypothesis import settings

FACTOR = int(os.environ.get("BATON_SOAK", "0"))
_QUICK_PART = 3


def examples(count: int) -> int:
    """Return how many examples to try: a third of ``count``, or BATON_SOAK times as many.

    Seeds differ in each run, so that the runs of a day find as much as one with all examples.
    """
    return count * FACTOR or max(count // _QUICK_PART, 1)


settings.register_profile("quick", max_examples=examples(100))
settings.load_profile("quick")
if FACTOR > 1:  # a failure that took hours must be replayable
    settings.register_profile("soak", max_examples=examples(100), print_blob=True)
    settings.load_profile("soak")
