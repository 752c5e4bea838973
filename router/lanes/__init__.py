"""Several models in one router: routes, canaries, shadows."""
