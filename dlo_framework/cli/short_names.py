"""Plug-ins' short names in configs, where another class has the same one.

jsonargparse finds a class by its short name among all that are imported, and refuses a name that two of them have:
``FSDPStrategy`` is Lightning's too. In a config, a plug-in's name means the plug-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dlo_framework.registry import Plugin


def with_class_paths(content: Any, class_paths: Mapping[str, str]) -> Any:
    """Returns a config, or a part of one, with the short names under ``class_path`` written in full.

    Args:
        content: any nest of mappings and lists.
        class_paths: what each short name stands for.
    """
    if isinstance(content, dict):
        full = {key: with_class_paths(value, class_paths) for key, value in content.items()}
        name = full.get("class_path")
        return {**full, "class_path": class_paths[name]} if isinstance(name, str) and name in class_paths else full
    if isinstance(content, list):
        return [with_class_paths(item, class_paths) for item in content]
    return content


def prefer_plugins(plugins: Iterable[Plugin]) -> None:
    """Has jsonargparse take plug-ins' short names for the plug-ins, in all that it parses from now on.

    Aliases of a strategy are left out: they are names of Lightning's, which set arguments besides.
    """
    import jsonargparse
    import yaml

    loader: Callable[[str], Any] = jsonargparse.get_loader("yaml")
    loader = getattr(loader, "without_plugins", loader)
    class_paths = {
        name: plugin.class_path
        for plugin in plugins
        for name in ((plugin.name,) if plugin.kind == "strategy" else plugin.names)
    }

    def load(text: str) -> Any:
        return with_class_paths(loader(text), class_paths)

    load.without_plugins = loader  # type: ignore[attr-defined]
    jsonargparse.set_loader("yaml", load, (yaml.YAMLError,))
