"""The routes, one module per area."""
