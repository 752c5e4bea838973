"""The workers as a router sees them: a slot and a stream for each. Nothing here knows of cost."""
