"""The OpenAI front door: validation, admission, placement, streams. No torch."""
