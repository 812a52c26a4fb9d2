"""Third-party pack of dlo plug-ins. It is imported only when a config names one of them, and stays empty."""
