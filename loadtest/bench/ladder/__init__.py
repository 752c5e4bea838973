"""What prompts and bodies of real length cost, step by step of a ladder of sizes."""
