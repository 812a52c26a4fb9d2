"""Check that a model of the Hugging Face hub can be loaded, before its library retries for half a minute."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from dlo_framework.errors import DloError, did_you_mean

#: Seconds to wait for a connection to the hub.
_TIMEOUT = 5.0


def check_hub_name(name: str, option: str, file: str) -> None:
    """Checks that a model of the hub is in the local cache, or that the hub can be reached.

    Args:
        name: Name of the model, `owner/name`; not that of an existing folder.
        option: Option with the name, for the error.
        file: File of the model that is needed.

    Raises:
        DloError: If neither is so.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return
    host = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        raise DloError(_message(name, option, "HF_HUB_OFFLINE is set"))
    if urllib.request.getproxies():
        return  # A proxy connects to the hub.
    try:
        port = host.port or (80 if host.scheme == "http" else 443)
        socket.create_connection((host.hostname or "", port), timeout=_TIMEOUT).close()
    except OSError as error:
        why = f"{constants.ENDPOINT} cannot be reached ({error.strerror or error})"
        raise DloError(_message(name, option, why)) from error


def _message(name: str, option: str, why: str) -> str:
    folder = Path(name).expanduser()
    near = folder.parent.iterdir() if folder.parent.is_dir() else ()
    hint = did_you_mean(folder.name, [path.name for path in near if path.is_dir()])
    return (
        f"{option} must be a folder, or a model of the Hugging Face hub, got {name}: no such folder in {Path.cwd()},"
        f" it is not in the hub's cache, and {why}{hint or '; set the path of a folder, or connect to the hub'}"
    )
