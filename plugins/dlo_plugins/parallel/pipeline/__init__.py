"""Pipeline parallelism: schedules as data, a model cut into stages, and the engine that runs a schedule on them.

Why not torch's ``distributed.pipelining``: its tracer must capture the whole model as one graph, and refuses a
forward that asks for a value; without the tracer the user writes each
stage as a module. Here any Python forward is cut without a change of its code, micro-batches may have any
shapes, and weights tied across stages are summed. The schedules are compared with torch's
(`tests/plugins/parallel/pipeline/test_pipeline_schedules.py`).
"""
