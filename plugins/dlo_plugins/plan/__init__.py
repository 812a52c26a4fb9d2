"""Finds the parallel plan with which a model trains fastest in a given memory, without a GPU: `dlo plan`."""
