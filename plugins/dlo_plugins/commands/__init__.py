"""Commands of ``dlo`` that come with the plug-ins, registered as entry points."""
