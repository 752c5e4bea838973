"""Reports on requests for people: why one was slow, lists of requests, and a log."""
