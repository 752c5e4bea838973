"""HTTP front end of the router: parsing, responses, batches, the live page, access."""
