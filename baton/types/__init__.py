"""Types that every part of Baton shares: errors, parameters, events, geometry, block hashes."""
