"""Load tests over HTTP, which know nothing of Baton; labs and a simulator, which do."""
