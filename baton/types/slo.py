"""Latencies that a good response keeps."""

from typing import Annotated

import msgspec


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latencies that a good response keeps.

    Attributes:
        ttft_s: Limit of the time to first token beyond twice the prompt's own time on an idle
            worker.
        itl_s: Limit of the mean ITL.
    """

    ttft_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    itl_s: Annotated[float, msgspec.Meta(gt=0, le=60)]

    def met_by(
        self, own_s: float, first_s: float, second_s: float, last_s: float, tokens: int
    ) -> bool:
        """Return whether a response kept both limits.

        The first token comes from a prefill worker, while the KV cache is transferred. A server
        that sends it together with the second token has a shorter ITL and a longer TTFT, so a
        response is also good if it would be good then.

        Args:
            own_s: Time that the prompt alone takes on an idle worker.
            first_s: Time from arrival to the first token.
            second_s: To the second token.
            last_s: To the last token.
            tokens: Number of tokens of one choice.
        """
        limit_s = self.ttft_s + 2 * own_s
        if first_s > limit_s:
            return False
        if last_s - first_s <= self.itl_s * max(tokens - 1, 1):
            return True
        return second_s <= limit_s and last_s - second_s <= self.itl_s * (tokens - 2)
