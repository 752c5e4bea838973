"""Tests of whole fleets: a package, so that its fleets end with its last test."""
