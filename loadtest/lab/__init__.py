"""`baton lab NAME`: experiments on common questions of operators, each with a table and a plot."""
