"""Settings of the process of attached servers, apart from the engines that it loads."""

import msgspec

from fleet.pools.resources import ControllerSpec


class AttachedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the process.

    Attributes:
        spec: Arguments that all workers share, with the fleet's configuration.
        number: Number of this process, of all those of the fleet.
    """

    spec: ControllerSpec
    number: int = 0
