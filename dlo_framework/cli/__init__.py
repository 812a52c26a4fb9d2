"""The command ``dlo``. Importing this package imports nothing heavy."""
