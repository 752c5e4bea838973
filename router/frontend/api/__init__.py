"""HTTP endpoints: parsing of request bodies, and responses. Workers are chosen elsewhere."""
