"""Work on clients' text outside the event loop: grammars, schemas, expressions, large bodies."""
