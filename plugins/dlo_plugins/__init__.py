"""The built-in plug-ins. Each is imported only when a config names it."""
