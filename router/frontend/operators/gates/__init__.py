"""Gates of canaries: golden prompts, evidence, and automatic rollback."""
