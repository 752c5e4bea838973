"""The torch-free core: block names, block pool, scheduler, parameters, errors."""
