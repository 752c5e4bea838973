"""Load tests over HTTP for any server, plus labs and a simulator for Baton."""
