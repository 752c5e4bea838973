"""The API's description: what answers look like, examples, keys. Nothing here runs per request."""
