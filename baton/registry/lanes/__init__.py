"""Tables about the models of a fleet, which its routers share."""
