"""`baton top` and the terminal that it draws on."""
