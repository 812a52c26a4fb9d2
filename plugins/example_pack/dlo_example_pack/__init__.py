"""A third-party pack of dlo plug-ins. It is imported only when a config names one of them, so it stays empty."""
