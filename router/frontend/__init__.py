"""The APIs of the router over HTTP: parsing, responses, batches, the page, access."""
