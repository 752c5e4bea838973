"""Base of tables that routers replace as a whole."""

import msgspec


class Versioned(msgspec.Struct, frozen=True):
    """Table whose ``version`` is the time of its last change in ms, or 0 without one."""

    version: int = 0


class TableChangeError(ValueError):
    """A change of a table is not possible; the message is for the operator."""
