"""Beam search is not offered. Whoever asks for it is told so, by the parameter that asks."""

from typing import Any

from engine.core.errors import InvalidRequestError

# Parameters of other servers, and the values that do not ask for beams.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_beam_search": (None, False),
    "num_beams": (None, 1),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
}


def without_beams(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` without parameters of beam search that ask for nothing.

    Raises:
        InvalidRequestError: One asks for it; the message says what to use in its place.
    """
    answers = 1 if data.get("n") is None else data["n"]
    neutral = _NEUTRAL | {"best_of": (None, answers)}
    for name, harmless in neutral.items():
        if name in data and data[name] not in harmless:
            raise InvalidRequestError(
                f"{name}: beam search, and choosing the best of more answers than are sent, are "
                "not supported by Baton; ask for n answers (n, temperature, seed) and choose among "
                "them by their logprobs",
                param=name,
            )
    return {name: value for name, value in data.items() if name not in neutral}
