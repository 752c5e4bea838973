"""`baton audit`."""
