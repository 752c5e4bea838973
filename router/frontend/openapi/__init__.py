"""OpenAPI document: schemas of responses, examples, API keys."""
