"""Commands of ``dlo`` that the core brings; each module has a ``main`` that takes the arguments after the command."""
