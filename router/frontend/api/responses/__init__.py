"""OpenAI's Responses API: ``/v1/responses``, made of the same events as the older ones."""
