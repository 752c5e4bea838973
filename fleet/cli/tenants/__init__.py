"""Command `baton tenants`: limits of tenants."""
