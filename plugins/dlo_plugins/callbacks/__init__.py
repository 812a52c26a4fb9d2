"""Training-recipe callbacks: a pure function for the mathematics, a callback that schedules it."""
