"""Text of shares for tables and sentences."""


def percent(share: float, digits: int = 1) -> str:
    """Return a share in percent, such as ``8.5 %``.

    Args:
        share: Share between 0 and 1.
        digits: Digits after the point.
    """
    return f"{100 * share:.{digits}f} %"
