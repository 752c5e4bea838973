"""The service that computes prompts for others and lets them pull the KV."""
