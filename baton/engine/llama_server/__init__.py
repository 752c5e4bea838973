"""llama-server of llama.cpp, which somebody else has started."""
