"""Tools of requests: what is offered, the grammar of calls, custom tools."""
