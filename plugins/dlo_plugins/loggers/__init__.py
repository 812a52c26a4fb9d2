"""Loggers that Lightning does not have."""
