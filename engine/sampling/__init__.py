"""From logits to tokens, on either backend: sampling, grammars, prompt log-probabilities."""
