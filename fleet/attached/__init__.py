"""The process of all attached servers, with a worker of the fleet for each."""
