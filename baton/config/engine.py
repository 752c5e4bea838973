"""What the fleet file says of the engines: real ones, or emulated ones that sleep."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator


class EngineConfig(BaseModel):
    """What computes: `real`, `emulated`, or a mapping with `emulated: TIMING_MODEL`.

    It is said of the whole fleet: emulated and real workers cannot hand KV to each other.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    # the names in baton.engine.emulated_timing.TIMINGS
    emulated: Literal["epyc-135m", "h100-70b"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _a_word_is_a_mapping(cls, value: object) -> object:
        words: dict[str, dict[str, object]] = {"real": {}, "emulated": {"emulated": "epyc-135m"}}
        if isinstance(value, str):
            if value not in words:
                raise ValueError("must be `real`, `emulated`, or a mapping with `emulated: TIMING`")
            return words[value]
        return value

    def check(self, wanted: dict[str, bool]) -> None:
        """Refuse what only real engines have.

        Args:
            wanted: Keys of the fleet file, and whether the file asks for it.

        Raises:
            ValueError: Names the first key.
        """
        for key in (key for key, asked in wanted.items() if asked and self.emulated):
            raise ValueError(f"{key}: emulated engines (pools.engine) have no such thing")
