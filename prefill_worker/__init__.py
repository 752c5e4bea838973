"""The service that computes prompts and hands their KV over."""
