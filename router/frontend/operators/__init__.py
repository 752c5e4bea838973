"""HTTP for operators: the fleet, its models, tenants, keys and usage."""
