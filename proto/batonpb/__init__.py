"""Generated from `proto/baton/v1`; see `proto/build.py`."""
