"""Pipeline parallelism: schedules as data, a model cut into stages, and the engine that runs a schedule on them."""
