"""Shipped configs, which ``dlo fit --config quickstart`` finds by name in any installation."""
