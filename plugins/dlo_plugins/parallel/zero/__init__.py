"""ZeRO: flat groups of parameters, gathering, gradient reduction, and the engine that runs them."""
