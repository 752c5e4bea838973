"""Workers as a router sees them: a slot and a stream for each, independent of costs."""
