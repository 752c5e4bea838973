"""Load tests over HTTP for any server, plus drills and a simulator for Baton."""
