"""Text of shares for tables and sentences."""


def percent(share: float, digits: int = 1) -> str:
    """Return a share between 0 and 1 in percent, such as ``8.5 %``."""
    return f"{100 * share:.{digits}f} %"
