"""The hand-off beside prefill's compute, and beside other transfer engines."""
