"""From a JSON Schema to a GBNF grammar whose every complete sentence is JSON that validates against the schema.

A sentence of the grammar may be stricter than the schema asks for (properties come in the order of the schema, none
that it does not name), never laxer: a keyword that the grammar cannot hold to is refused by name before anything is
generated. Vocabulary: JSON Schema 2020-12, core and validation, as far as `_Compiler` has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LIMIT_RULES = 2000
LIMIT_VALUES = 4000
"""Most single values (of `enum`, `const` and ranges) in one grammar: each may have to be tried against every token of
the vocabulary, for every token of the answer, while everybody else waits."""
LIMIT_CHARACTERS = 1 << 18
"""Of one grammar, the shared rules not counted."""
LIMIT_REPEATS = 1000
_LIMIT_RANGE = 1000
_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$comment",
        "$defs",
        "definitions",
    }
)
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength"}),
    "number": frozenset({"minimum"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_SHARED = {
    "ws": r'| " " | "\n" [ \t]{0,20}',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" ws (member ("," ws member)*)? "}" ws',
    "member": 'string ":" ws value',
    "array": '"[" ws (value ("," ws value)*)? "]" ws',
    "string": r'"\"" char* "\"" ws',
    "char": r'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" escaped)',
    "escaped": "[0-9a-cA-Ce-fE-F] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}",
    "number": '"-"? magnitude ws',
    "magnitude": 'whole ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "integer": '"-"? whole ws',
    "whole": '"0" | positive',
    "positive": "[1-9] [0-9]{0,15}",
    "boolean": '("true" | "false") ws',
    "null": '"null" ws',
}
"""Rules every grammar has. White space follows each token of JSON, one of these four ways, and is bounded."""


class SchemaRefused(Exception):
    """The schema has no exact grammar here. `keyword` is at fault; the message never quotes the schema's content."""

    def __init__(self, keyword: str, reason: str) -> None:
        super().__init__(reason)
        self.keyword = keyword


def any_object() -> str:
    """The grammar of one JSON object, whatever its members."""
    rules = Rules()
    rules.rules["root"] = "object"
    return rules.text()


def grammar(schema: object) -> str:
    """The grammar of the JSON that the schema describes, from `root`. Raises SchemaRefused."""
    rules = Rules()
    rules.rules["root"] = rules.add(schema)
    return rules.text()


@dataclass(slots=True)
class _Size:
    """How much of its bounds a grammar has used up."""

    values: int = 0
    characters: int = 0

    def add_values(self, count: int) -> None:
        self.values += count
        if self.values > LIMIT_VALUES:
            raise SchemaRefused("(size)", f"the schema has more than {LIMIT_VALUES} single values")

    def add_text(self, text: str) -> str:
        self.require_room(len(text))
        self.characters += len(text)
        return text

    def require_room(self, count: int) -> None:
        """Ask before much work is put into that many characters."""
        if self.characters + count > LIMIT_CHARACTERS:
            raise SchemaRefused("(size)", f"the schema's grammar is longer than {LIMIT_CHARACTERS} characters")


class Rules:
    """Grammar rules for any number of schemas, to be put into one grammar with others."""

    def __init__(self) -> None:
        self.rules: dict[str, str] = dict(_SHARED)
        self._size = _Size()

    def add(self, schema: object) -> str:
        """Compile a schema; the name of its rule. Raises SchemaRefused."""
        return _Compiler(schema, self.rules, self._size).rule(schema)

    def text(self) -> str:
        """The grammar; `rules` has a root by now."""
        return "".join(f"{name} ::= {body}\n" for name, body in self.rules.items())


def literal(text: str) -> str:
    """`text` as a GBNF string."""
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isascii() and character.isprintable():
        return character
    return f"\\U{ord(character):08x}"


class _Compiler:
    """One document: its subschemas by pointer, each a rule of its own, so that references may be circular."""

    def __init__(self, document: object, rules: dict[str, str], size: _Size) -> None:
        self._document = document
        self._rules = rules
        self._size = size
        self._referenced: dict[str, str] = {}

    def rule(self, schema: object) -> str:
        return self._name(self._expression(schema))

    def _name(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        if len(self._rules) >= LIMIT_RULES:
            raise SchemaRefused("(size)", f"the schema needs more than {LIMIT_RULES} grammar rules")
        self._rules[name] = self._size.add_text(body)
        return name

    def _expression(self, schema: object) -> str:
        if schema is True or schema == {}:
            return "value"
        if not isinstance(schema, dict):
            raise SchemaRefused("(schema)", "a schema is an object or true")
        keys = schema.keys() - _ANNOTATIONS
        for keyword, compile_it in self._whole_schemas().items():
            if keyword in keys:
                if keyword in ("enum", "const"):
                    keys -= {"type"}
                _alone(keyword, keys)
                return compile_it(schema)
        kinds = self._kinds(schema, keys)
        unknown = keys - {"type"} - frozenset().union(*(_OF_TYPE[kind] for kind in kinds))
        if unknown:
            raise SchemaRefused(min(unknown), "this keyword is not supported here")
        return " | ".join(self._of_type(kind, schema) for kind in kinds)

    def _whole_schemas(self) -> Mapping[str, Callable[[Mapping[str, object]], str]]:
        """Keywords that say everything about a value: nothing else may stand beside them."""
        return {
            "$ref": lambda schema: self._reference(schema["$ref"]),
            "const": lambda schema: self._constants([schema["const"]], schema, "const"),
            "enum": lambda schema: self._constants(schema["enum"], schema, "enum"),
            "anyOf": lambda schema: self._any_of(schema["anyOf"]),
        }

    def _any_of(self, branches: object) -> str:
        if not isinstance(branches, list) or not branches:
            raise SchemaRefused("anyOf", "it needs at least one schema")
        return " | ".join(self.rule(branch) for branch in branches)

    def _reference(self, pointer: object) -> str:
        match = re.fullmatch(r"#(?:/(\$defs|definitions)/([^/]+))?", pointer) if isinstance(pointer, str) else None
        if match is None:
            raise SchemaRefused("$ref", "only # and references into $defs or definitions are supported")
        assert isinstance(pointer, str)
        if pointer not in self._referenced:
            name = self._referenced[pointer] = self._name("")  # reserved: the target may refer to itself
            self._rules[name] = self._size.add_text(self._expression(self._target(match)))
        return self._referenced[pointer]

    def _target(self, match: re.Match[str]) -> object:
        target = self._document
        if match[1] is not None:
            for step in (match[1], match[2].replace("~1", "/").replace("~0", "~")):
                target = target.get(step) if isinstance(target, dict) else None
                if target is None:
                    raise SchemaRefused("$ref", "it points to nothing")
        return target

    @staticmethod
    def _kinds(schema: Mapping[str, object], keys: set[str]) -> Sequence[str]:
        stated = schema.get("type")
        if stated is None:
            found = [kind for kind in ("object", "array", "string", "integer") if keys & _OF_TYPE[kind]]
            if len(found) == 1:
                return found
            raise SchemaRefused(min(keys, default="type"), "this keyword is not supported here without a type")
        asked = stated if isinstance(stated, list) else [stated]
        kinds = [kind for kind in asked if isinstance(kind, str) and kind in _TYPES]
        if not kinds or len(kinds) != len(asked):
            raise SchemaRefused("type", "it names no known type")
        return kinds

    def _of_type(self, kind: str, schema: Mapping[str, object]) -> str:
        match kind:
            case "object":
                return self._object(schema)
            case "array":
                return self._array(schema)
            case "string":
                low, high = _bounds(schema, "minLength", "maxLength")
                return "string" if (low, high) == (0, None) else rf'"\"" char{_times(low, high)} "\"" ws'
            case "integer":
                return self._integer(schema)
            case "number":
                return _number(schema)
            case _:
                return kind

    def _array(self, schema: Mapping[str, object]) -> str:
        low, high = _bounds(schema, "minItems", "maxItems")
        if high == 0:
            return '"[" ws "]" ws'
        item = self.rule(schema.get("items", True))
        more = f'("," ws {item}){_times(max(low - 1, 0), None if high is None else high - 1)}'
        body = f"{item} {more}" if low else f"({item} {more})?"
        return f'"[" ws {body} "]" ws'

    def _object(self, schema: Mapping[str, object]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise SchemaRefused("properties", "it is no object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaRefused("required", "it is no list of names")
        others = schema.get("additionalProperties", True)
        members = {**properties, **{name: others for name in required if name not in properties}}
        if others is False and len(members) > len(properties):
            raise SchemaRefused("required", "it asks for a property that additionalProperties forbids")
        if members:
            return self._members(members, frozenset(required))
        if others is False:
            return '"{" ws "}" ws'
        member = f'string ":" ws {self.rule(others)}'
        return f'"{{" ws ({member} ("," ws {member})*)? "}}" ws'

    def _members(self, members: Mapping[str, object], required: frozenset[str]) -> str:
        """The members in order, those not required left out at will. Built from the last one: what may follow member
        i where one came before (`tail`), and what may come from i on where none did (`head`)."""
        head = tail = ""
        self._size.require_room(sum(map(len, members)))
        for name, schema in reversed(list(members.items())):
            pair = f'{literal(json.dumps(name, ensure_ascii=False))} ws ":" ws {self.rule(schema)}'
            if name in required:
                head, tail = f"{pair} {tail}", f'"," ws {pair} {tail}'
            else:
                head = f"{pair} {tail} | {head}" if head else f"({pair} {tail})?"
                tail = f'("," ws {pair})? {tail}'
            head, tail = self._name(head), self._name(tail)
        return f'"{{" ws {head} "}}" ws'

    def _constants(self, values: object, schema: Mapping[str, object], keyword: str) -> str:
        if not isinstance(values, list):
            raise SchemaRefused(keyword, "it is no list")
        self._size.add_values(len(values))
        if "type" in schema:
            kinds = self._kinds(schema, set())
            values = [value for value in values if any(_IS_TYPE[kind](value) for kind in kinds)]
        if not values:
            raise SchemaRefused(keyword, "no value is left")
        texts = [json.dumps(value, ensure_ascii=False) for value in values]
        self._size.require_room(sum(map(len, texts)))
        return f"({' | '.join(literal(text) for text in texts)}) ws"

    def _integer(self, schema: Mapping[str, object]) -> str:
        low, high = _limits(schema)
        if low is None and high is None:
            return "integer"
        if low is not None and high is not None:
            if not 0 <= high - low < _LIMIT_RANGE:
                raise SchemaRefused("maximum", f"only ranges of 1 to {_LIMIT_RANGE} integers are supported")
            self._size.add_values(high - low + 1)
            return f"({' | '.join(literal(str(number)) for number in range(low, high + 1))}) ws"
        if low in (0, 1):
            return "whole ws" if low == 0 else "positive ws"
        stated = [keyword for keyword in _OF_TYPE["integer"] if schema.get(keyword) is not None]
        raise SchemaRefused(min(stated), "an open range is supported from 0 or 1 only")


def _alone(keyword: str, keys: set[str]) -> None:
    others = keys - {keyword}
    if others:
        raise SchemaRefused(min(others), f"this keyword is not supported beside {keyword}")


_IS_TYPE: Mapping[str, Callable[[object], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: type(value) in (int, float),
    "integer": lambda value: type(value) is int,
    "boolean": lambda value: type(value) is bool,
    "null": lambda value: value is None,
}


def _count(schema: Mapping[str, object], keyword: str, default: int | None) -> int | None:
    value = schema.get(keyword, default)
    if value is not None and (type(value) is not int or not 0 <= value <= LIMIT_REPEATS):
        raise SchemaRefused(keyword, f"only 0 to {LIMIT_REPEATS} is supported")
    assert value is None or isinstance(value, int)
    return value


def _bounds(schema: Mapping[str, object], low: str, high: str) -> tuple[int, int | None]:
    least, most = _count(schema, low, 0) or 0, _count(schema, high, None)
    if most is not None and most < least:
        raise SchemaRefused(high, f"it is less than {low}")
    return least, most


def _times(low: int, high: int | None) -> str:
    if high is None:
        return f"{{{low},}}" if low else "*"
    return f"{{{low},{high}}}"


def _limits(schema: Mapping[str, object]) -> tuple[int | None, int | None]:
    """The least and the greatest integer allowed, None where there is no bound."""
    limits: dict[str, int] = {}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        value = schema.get(keyword)
        if value is not None:
            if type(value) is not int:
                raise SchemaRefused(keyword, "only integers are supported")
            limits[keyword] = value
    lows = [limits[key] + add for key, add in (("minimum", 0), ("exclusiveMinimum", 1)) if key in limits]
    highs = [limits[key] - take for key, take in (("maximum", 0), ("exclusiveMaximum", 1)) if key in limits]
    return max(lows, default=None), min(highs, default=None)


def _number(schema: Mapping[str, object]) -> str:
    low = schema.get("minimum")
    if low is None:
        return "number"
    if type(low) in (int, float) and low == 0:
        return "magnitude ws"
    raise SchemaRefused("minimum", "only 0 is supported for numbers")
