"""From logits to tokens, for either backend: sampling, grammars, draft tokens, prompt logprobs.

``step_sampler.py`` is what a runner uses. Nothing here computes logits.
"""
