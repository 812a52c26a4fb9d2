"""``dlo schema``: writes the JSON schema of configs, for completion in editors."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dlo_framework.atomic_file import write_atomic
from dlo_framework.cli.command_table import SECTIONS
from dlo_framework.cli.config_scan import CommandParser
from dlo_framework.registry import Plugin, Registry
from dlo_framework.registry.class_source import (
    ClassSource,
    Parameter,
    SourceNotFoundError,
    read_class,
    read_exports,
)

DESCRIPTION = """Print the JSON schema of configs, with every installed plug-in, for completion and checks in editors.

  dlo schema --out dlo.schema.json

An editor with yaml-language-server reads it in a config whose first line is

  # yaml-language-server: $schema=dlo.schema.json"""


def main(argv: list[str]) -> int:
    """Prints the schema, or writes it to a file."""
    parser = CommandParser("dlo schema", description=DESCRIPTION)
    parser.add_argument("--out", metavar="FILE", help="file to write (default: print)")
    out = parser.parse_args(argv).out
    text = json.dumps(make_schema(Registry()), indent=1)
    if out is None:
        print(text)
        return 0
    write_atomic(Path(out), f"{text}\n")
    print(f"wrote {out}; first line of a config: # yaml-language-server: $schema={out}")
    return 0


Schema = dict[str, Any]

_DRAFT = "http://json-schema.org/draft-07/schema#"
#: Lightning's modules of classes that configs name by short names, by the Trainer's key.
_LIGHTNING = {"callbacks": "lightning.pytorch.callbacks", "logger": "lightning.pytorch.loggers"}
_PLAIN: dict[str, Schema] = {
    "int": {"type": "integer"},
    "float": {"type": ["number", "string"]},  # YAML reads 1e-3 as a text, which dlo accepts as a number.
    "bool": {"type": "boolean"},
    "str": {"type": "string"},
    "None": {"type": "null"},
    "Path": {"type": "string"},
}
_ANY: Schema = {}
_LISTS = {"list", "List", "Sequence", "Iterable", "set", "frozenset"}
_MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping"}


def make_schema(registry: Registry) -> Schema:
    """Returns the schema of a config, with every installed plug-in.

    Args:
        registry: Registry of the plug-ins.
    """
    definitions: dict[str, Schema] = {}

    def classes(plugins: Iterable[Plugin], more: Iterable[tuple[str, str]] = ()) -> Schema:
        named = [(plugin.name, plugin.target) for plugin in plugins]
        named += [(name, target) for name, target in more if name not in dict(named)]
        shown = [_class_schema(name, target, definitions) for name, target in named]
        return {"anyOf": [*shown, _OTHER_CLASS]}

    def lightning(key: str) -> list[tuple[str, str]]:
        return [(name, f"{_LIGHTNING[key]}:{name}") for name in read_exports(_LIGHTNING[key])]

    strategies = registry.plugins("strategy")
    names = ["auto", "ddp", *(alias for plugin in strategies for alias in plugin.aliases)]
    callback = classes(registry.plugins("callback"), lightning("callbacks"))
    logger = classes((), lightning("logger"))
    definitions["applier"] = classes(registry.plugins("applier"))
    definitions["callback"], definitions["logger"] = callback, logger
    trainer = _arguments(read_class(SECTIONS["trainer"]))
    trainer["properties"] |= {
        "strategy": {"anyOf": [{"enum": names}, classes(strategies), {"type": "string"}]},
        "callbacks": _one_or_many({"$ref": "#/definitions/callback"}),
        "logger": {"anyOf": [{"type": "boolean"}, *_one_or_many({"$ref": "#/definitions/logger"})["anyOf"]]},
    }
    path = {"type": ["string", "null"]}
    properties: Schema = {
        "plugins": _one_or_many({"type": "string"}) | {"description": "Modules and files of your own to import."},
        "seed_everything": {"type": ["integer", "boolean"], "description": "Seed; 42 by default."},
        "trainer": trainer,
        "model": classes(registry.plugins("task")),
        "data": {"anyOf": [*classes(registry.plugins("data"))["anyOf"], {"type": "null"}]},
        "run": _arguments(read_class(SECTIONS["run"])),
        "ckpt_path": path | {"description": "Checkpoint: a path, last, best, or auto."},
        "weights_only": {"type": ["boolean", "null"]},
        "optimizer": _ANY,
        "lr_scheduler": _ANY,
    }
    return {
        "$schema": _DRAFT,
        "title": "Config of dlo",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "definitions": definitions,
    }


#: A class that is not a plug-in: the user's, or a library's, by its class path.
_OTHER_CLASS: Schema = {
    "type": "object",
    "properties": {
        "class_path": {"type": "string", "pattern": r"\.|^[A-Z]"},
        "init_args": {"type": ["object", "null"]},
        "dict_kwargs": {"type": ["object", "null"]},
    },
    "required": ["class_path"],
    "additionalProperties": False,
}


def _class_schema(name: str, target: str, definitions: dict[str, Schema]) -> Schema:
    """Returns the schema of a class under ``class_path``, and adds that of its arguments to the definitions.

    In a config with another class the schema does not apply, so that an editor reports its faults only where it does.
    """
    try:
        source = read_class(target)
    except SourceNotFoundError:
        return _OTHER_CLASS
    definitions[name] = _arguments(source)
    shown = source.doc.split("\n\n")[0].replace("\n", " ")
    return {
        "type": "object",
        "description": shown,
        "properties": {
            "class_path": {"enum": [name, target.replace(":", ".")]},
            "init_args": {"anyOf": [{"$ref": f"#/definitions/{name}"}, {"type": "null"}]},
            "dict_kwargs": {"type": ["object", "null"]},
        },
        "required": ["class_path"],
        "additionalProperties": False,
    }


def _arguments(source: ClassSource) -> Schema:
    """Returns the schema of a constructor's arguments."""
    properties = {parameter.name: _argument(parameter) for parameter in source.parameters}
    return {"type": "object", "properties": properties, "additionalProperties": bool(source.takes_any)}


def _argument(parameter: Parameter) -> Schema:
    schema = dict(schema_of_type(parameter.type))
    if parameter.doc:
        schema["description"] = parameter.doc
    if parameter.default is not None:
        try:
            default = ast.literal_eval(parameter.default)
        except (ValueError, SyntaxError):
            return schema
        if isinstance(default, str | int | float | bool | None):
            schema["default"] = default
    return schema


def _one_or_many(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "array", "items": schema}, {"type": "null"}]}


def schema_of_type(annotation: str) -> Schema:
    """Returns the schema of a type's source text; an empty one, which takes anything, for a type that it cannot read.

    Args:
        annotation: Text such as `list[int] | None`.
    """
    try:
        return _of_node(ast.parse(annotation, mode="eval").body)
    except SyntaxError:
        return _ANY


def _of_node(node: ast.expr) -> Schema:
    if isinstance(node, ast.Constant):
        return _PLAIN["None"] if node.value is None else schema_of_type(str(node.value))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_of_node(node.left), _of_node(node.right)])
    if isinstance(node, ast.Subscript):
        name = ast.unparse(node.value).rpartition(".")[2]
        arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return _of_generic(name, arguments)
    name = ast.unparse(node).rpartition(".")[2]
    if name in _LISTS or name == "tuple":
        return {"type": "array"}
    return {"type": "object"} if name in _MAPPINGS else _PLAIN.get(name, _ANY)


def _of_generic(name: str, arguments: list[ast.expr]) -> Schema:
    if name == "Literal":
        return {"enum": [ast.literal_eval(argument) for argument in arguments]}
    if name == "Optional":
        return _union([_of_node(arguments[0]), _PLAIN["None"]])
    if name == "Union":
        return _union([_of_node(argument) for argument in arguments])
    if name in _LISTS:
        return {"type": "array", "items": _of_node(arguments[0])}
    if name in _MAPPINGS:
        return {"type": "object", "additionalProperties": _of_node(arguments[-1])}
    return {"type": "array"} if name in ("tuple", "Tuple") else _ANY


def _union(schemas: list[Schema]) -> Schema:
    flat = [inner for schema in schemas for inner in schema.get("anyOf", [schema])]
    return _ANY if _ANY in flat else {"anyOf": flat}
