"""Random JSON schemas of the kinds that people write, and nothing that a random writer could not get to the end of.

Strings have a longest length, arrays a largest number of items; what refers to itself does so less than once.
"""

from __future__ import annotations

import random
import string
from typing import Any

Schema = dict[str, Any]

PATTERNS = ["^[a-z]{2,5}$", "^[A-Z][a-z]{0,6}( [A-Z])?$", r"^\d{3}-\d{4}$", "^(red|green|blue)$", "^x[0-9a-f]{1,4}y?$"]
FORMATS = ["uuid", "ipv4", "date", "date-time", "time"]
MAX_DEPTH = 3


class SchemaWriter:
    """Writes one schema after the other from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}

    def schema(self) -> Schema:
        """A whole schema: mostly an object, with definitions where it refers to some."""
        self._definitions = {}
        write = self.random.choice([self._object, self._object, self._object, self._array, self._any_of])
        schema = write(0)
        if self._definitions:
            schema["$defs"] = self._definitions
        if self.random.random() < 0.2:
            schema |= {"title": "Answer", "description": "What is wanted.", "$comment": "no more than that"}
        return schema

    def _part(self, depth: int) -> Schema:
        leaves = [self._string, self._integer, self._number, self._enum, self._simple]
        nested = [self._object, self._array, self._tuple, self._any_of, self._one_of, self._all_of]
        nested += [self._reference, self._reference, self._nullable]
        return self.random.choice(leaves if depth >= MAX_DEPTH else leaves + nested)(depth + 1)

    def _name(self) -> str:
        return "".join(self.random.choices(string.ascii_lowercase + "_", k=self.random.randint(1, 8)))

    def _string(self, depth: int) -> Schema:
        match self.random.randrange(3):
            case 0:
                return {"type": "string", "pattern": self.random.choice(PATTERNS)}
            case 1:
                return {"type": "string", "format": self.random.choice(FORMATS)}
        least = self.random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self.random.randint(0, 8)}

    def _integer(self, depth: int) -> Schema:
        low = self.random.randint(-1000, 1000)
        bounds: Schema = self.random.choice(
            [{}, {"minimum": low}, {"minimum": low, "maximum": low + 40}, {"exclusiveMaximum": low}, {"multipleOf": 5}]
        )
        return {"type": "integer", **bounds}

    def _number(self, depth: int) -> Schema:
        low = self.random.randint(-50, 50)
        bounds: Schema = self.random.choice([{}, {"minimum": low, "maximum": low + 0.5}, {"exclusiveMinimum": low}])
        return {"type": "number", **bounds}

    def _enum(self, depth: int) -> Schema:
        values = [self._name(), self.random.randint(0, 9), None, True, 1.5, ["a", 1], {"k": "v"}, 'quo"te\n', "ünï"]
        chosen = self.random.sample(values, self.random.randint(1, 4))
        return {"const": chosen[0]} if len(chosen) == 1 else {"enum": chosen}

    def _simple(self, depth: int) -> Schema:
        return {"type": self.random.choice(["boolean", "null"])}

    def _nullable(self, depth: int) -> Schema:
        return {"type": ["string", "null"], "maxLength": 5}

    def _array(self, depth: int) -> Schema:
        least = self.random.randint(0, 2)
        return {
            "type": "array",
            "items": self._part(depth),
            "minItems": least,
            "maxItems": least + self.random.randint(0, 2),
        }

    def _tuple(self, depth: int) -> Schema:
        parts = [self._part(depth) for _ in range(self.random.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _object(self, depth: int) -> Schema:
        properties = {self._name(): self._part(depth) for _ in range(self.random.randint(0, 4))}
        required = [name for name in properties if self.random.random() < 0.7]
        schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        if self.random.random() < 0.15:
            schema["patternProperties"] = {"^k[0-9]$": {"type": "boolean"}}
        return schema | ({"required": required} if required else {})

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._part(depth) for _ in range(self.random.randint(1, 3))]}

    def _one_of(self, depth: int) -> Schema:
        # Of kinds that exclude each other, as people write them.
        kinds = self.random.sample([self._string, self._integer, self._object, self._array], self.random.randint(1, 3))
        return {"oneOf": [write(depth) for write in kinds]}

    def _all_of(self, depth: int) -> Schema:
        low = self.random.randint(0, 9)
        bounds: list[list[Schema]] = [
            [{"type": "integer", "minimum": low}, {"maximum": low + 9}],
            [{"type": "string", "minLength": low // 3}, {"maxLength": 9}],
            [{"type": "string", "pattern": "^[a-z]+$"}, {"pattern": "^[^x]*$", "maxLength": 7}],
            [{"type": "array", "items": {"type": "boolean"}, "maxItems": 4}, {"minItems": 1}],
        ]
        return {"allOf": self.random.choice(bounds)}

    def _reference(self, depth: int) -> Schema:
        name = f"Def{len(self._definitions)}"
        self._definitions[name] = {}
        if self.random.random() < 0.3:
            children = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 1}
            self._definitions[name] = {
                "type": "object",
                "properties": {"value": {"type": "integer"}, "children": children},
                "required": ["value"],
                "additionalProperties": False,
            }
        else:
            self._definitions[name] = self._part(depth)
        return {"$ref": f"#/$defs/{name}"}
