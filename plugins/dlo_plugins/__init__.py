"""Built-in plug-ins; each is imported only when a config names it."""
