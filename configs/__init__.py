"""The shipped configs, so that ``dlo fit --config quickstart`` finds them wherever dlo is installed."""
