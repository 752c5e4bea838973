"""`baton lab NAME`: the questions operators ask, each one command with a table and a plot."""
