"""Choice of the model that answers a request, by the name that the client sent."""
