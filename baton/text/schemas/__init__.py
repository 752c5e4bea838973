"""Parts of a JSON schema that are rewritten before a grammar is made of them."""
