"""Base of tables that routers replace as a whole."""

import msgspec


class Versioned(msgspec.Struct, frozen=True):
    """Table whose ``version`` is the time of its last change in ms, or 0 without one."""

    version: int = 0
