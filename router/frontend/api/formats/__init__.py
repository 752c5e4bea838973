"""How answers are written: what every API's format does, and OpenAI's older formats."""
