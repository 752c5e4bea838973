"""Scheduling, blocks and reservations as pure state machines. No torch, no clock, no I/O."""
