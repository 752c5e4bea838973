"""Types shared by all parts of Baton: errors, parameters, events, geometry, block hashes."""
