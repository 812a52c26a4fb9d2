"""Learning-rate schedules, the learning-rate finder, and schedule-free training."""
