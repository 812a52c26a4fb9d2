"""Commands of ``dlo`` that the core brings.

The ``main`` of each takes the arguments after the command, and returns the exit code. It raises a DloError for invalid
input.
"""
