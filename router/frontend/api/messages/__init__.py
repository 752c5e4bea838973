"""Anthropic's Messages API: ``/v1/messages``, made of the same events as OpenAI's."""
