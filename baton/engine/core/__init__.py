"""The engine's decisions as plain state machines. No torch, no clock, no I/O."""
