"""Tables in Redis that routers replace as a whole."""
