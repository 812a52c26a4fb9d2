"""What chaos.py runs: a plug-in that marks where a run is, and trials that end it there."""
